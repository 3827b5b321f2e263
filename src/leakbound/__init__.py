"""leakbound: how much training data do federated updates leak, and what bounds it?"""
