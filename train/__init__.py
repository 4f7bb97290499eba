"""Training on a mesh: jitted with every sharding given, saved and resumed. Sees no torch."""
