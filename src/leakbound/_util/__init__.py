"""Utilities without knowledge of federated learning."""
