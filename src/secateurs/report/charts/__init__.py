"""One file a figure: each takes records and gives a `Figure`."""
