"""Play groups of episodes and commit their trajectories."""
