"""Measurements that make lab/notes/performance.md: run `make bench`."""
