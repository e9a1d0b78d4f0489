"""Write versions of the weights, and export them."""
