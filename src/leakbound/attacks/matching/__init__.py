"""Gradient matching: settings, objective, loop, choice of an engine, and diagnosis of failures."""
