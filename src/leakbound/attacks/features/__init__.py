"""Reading the inputs of a linear layer off an update: features first, images after."""
