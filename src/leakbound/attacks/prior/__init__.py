"""A learned prior: a small denoiser of public examples, and the attack that uses it."""
