"""Whole procedures that make a network smaller: our own and its rivals, each under one budget."""
