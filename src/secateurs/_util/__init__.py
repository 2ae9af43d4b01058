"""Helpers for all packages: atomic files, tensors on disk, downloads, decoding, text formats."""
