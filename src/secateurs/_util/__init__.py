"""Small things that everything else stands on: files, tensors on disk, text formats."""
