"""What is computed from a stored run for people: statistics, comparisons, the report."""
