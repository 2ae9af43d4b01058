"""Time: what a network takes in the engine that will run it, measured and predicted."""
