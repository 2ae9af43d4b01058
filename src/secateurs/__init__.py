"""secateurs makes trained PyTorch networks smaller by removing whole filters and neurons."""
