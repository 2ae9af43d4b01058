"""Adapters to other pruning libraries, none of which has to be installed."""
