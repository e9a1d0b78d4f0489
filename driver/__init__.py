"""The driver starts, watches, restarts and stops the processes of a run."""
