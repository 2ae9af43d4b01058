"""What lets other people's tools use ours; none of them has to be installed."""
