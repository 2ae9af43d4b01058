"""A pruning run: Algorithm 1, its context, budget, journal and results."""
