"""Engines: a model's gradients, their pulls and their changes, faster than autograd gives them.

`choose` picks the engine of an attack step (`base` says what one does), `sensitivity` holds the
gradients of examples and how much every coordinate of a gradient reveals.
"""
