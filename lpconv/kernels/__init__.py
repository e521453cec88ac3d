"""Fast kernels, each tested against a slow reference implementation."""
