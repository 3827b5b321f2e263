"""privacy_check: a Flower app that states what its own privacy settings protect."""
