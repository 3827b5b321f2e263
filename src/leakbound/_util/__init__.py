"""Parts that know nothing of federated learning."""
