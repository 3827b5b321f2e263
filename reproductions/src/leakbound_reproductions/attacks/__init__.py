"""Attacks that only the papers' studies use; users name them as they name built-in ones."""
