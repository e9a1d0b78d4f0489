"""Let the ranks of a learner work together."""
