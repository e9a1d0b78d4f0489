"""Read what a stranger may have written."""
