"""Table 1: pruning networks that learned XOR."""
