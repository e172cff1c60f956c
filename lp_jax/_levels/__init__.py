"""Floor 3: a chain of layers, its levels, and the pieces that multigrid is made of."""
