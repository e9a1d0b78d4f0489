"""Write prompts and read answers."""
