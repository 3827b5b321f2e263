"""Attacks on rows of tables with known columns: spans of gradients, touched embedding rows."""
