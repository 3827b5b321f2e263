"""Paper C's figures 1, 3, 4 and 5, its claims, and what the exact law says where they fail.

Run it with `leakbound reproduce mean_to_extreme`.
"""
