"""Valadi et al.: which choices of a production training resist gradient inversion, as measured."""
