"""Exact attacks on sequences of tokens."""
