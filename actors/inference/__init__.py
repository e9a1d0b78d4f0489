"""Generate with vLLM: engines, policies, and the weights that they load."""
