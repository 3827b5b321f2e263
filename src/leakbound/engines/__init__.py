"""Engines: a model's gradients, their vector-Jacobian products and changes, faster than autograd.

`choose` picks the engine of an attack step (`base` defines what an engine does). `sensitivity`
holds the per-example gradients and how much every coordinate of a gradient reveals.
"""
