"""Paper B: its theory of the two-layer network checked by numbers.

Run it with `python -m leakbound.experiments.systematic_evaluation theory`.
"""
