"""Table 2: per-layer removals of ResNet-20."""
