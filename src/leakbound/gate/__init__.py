"""A gate for a project: what its audits, deployments, models and clients must be, and whether."""
