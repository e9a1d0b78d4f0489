"""Load the policy, and compute with it."""
