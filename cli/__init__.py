"""The `gigpo` program: one module per command."""
