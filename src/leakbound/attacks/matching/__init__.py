"""Gradient matching: settings, objective, loop, the choice of an engine, and what went wrong."""
