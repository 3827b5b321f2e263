"""The MNIST comparisons of "Optimal Defenses Against Data Reconstruction Attacks", repeated.

`python -m leakbound_reproductions.optimal_defenses` runs them and writes results.md and figures.
Chen, Gursoy and Lei, arXiv 2411.03746 and its workshop version (ICML 2025).
"""
