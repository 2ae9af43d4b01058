"""Measurements that make docs/performance.md: run `make bench`."""
