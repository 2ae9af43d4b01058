"""How many filters go: searches, the accuracy contract, allocations over sites."""
