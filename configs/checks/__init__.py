"""Check settings against each other."""
