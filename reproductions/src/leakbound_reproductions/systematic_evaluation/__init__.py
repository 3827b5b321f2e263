"""Paper B: its theory of the two-layer network, checked numerically.

Run it with `python -m leakbound_reproductions.systematic_evaluation theory`.
"""
