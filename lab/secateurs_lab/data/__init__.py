"""Data sets of the experiments: the paper's XOR points, and MNIST."""
