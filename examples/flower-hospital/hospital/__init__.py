"""hospital: federated learning between hospitals that measure and bound what they leak."""
