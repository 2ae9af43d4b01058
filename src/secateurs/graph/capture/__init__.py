"""Three ways to capture a network as a torch.fx graph of its own submodules: symbolic tracing, recording, torch.export."""
