"""Criteria that are compared with: those of ancestors. Each file registers its own; entry points name them."""
