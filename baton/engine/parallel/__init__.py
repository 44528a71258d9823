"""What ranks of a model share: the division of the model, sums over all ranks, and the steps that the first one
tells."""
