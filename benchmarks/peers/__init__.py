"""Other tools' attacks, on the models, images and starts of a comparison."""
