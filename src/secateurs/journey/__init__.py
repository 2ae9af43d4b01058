"""The parts of a run, one idea a file; `secateurs.run` is where they come together.

Every part takes what it needs from an `Outfit`, and the network as a `Standing`; it looks into the journal whether its work is
done already, does it if not, and writes it down.
"""
