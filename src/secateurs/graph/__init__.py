"""The network as a graph of ordinary modules: tracing, sites, masks, costs."""
