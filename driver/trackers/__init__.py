"""Send metrics to Weights & Biases, trackio and MLflow."""
