"""The exact attack step without differentiating a backward pass: see `base`."""
