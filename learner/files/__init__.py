"""Write and read checkpoints."""
