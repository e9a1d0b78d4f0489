"""Read batches and make micro-batches of them."""
