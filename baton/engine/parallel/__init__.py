"""What ranks of a model share: who has which part of it, sums over all of them, and the steps that the first one
tells."""
