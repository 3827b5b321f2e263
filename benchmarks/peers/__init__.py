"""Other people's attacks, on the models, images and starts of a comparison."""
