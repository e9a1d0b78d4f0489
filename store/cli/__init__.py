"""`python -m store`: one module per command, each with `add(commands)`."""
