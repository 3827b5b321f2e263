"""The study of PriPrune (Chu et al. 2024): its measures and its defense on small models."""
