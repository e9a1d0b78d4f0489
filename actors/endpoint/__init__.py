"""Serve agent programs: the model endpoint that they call, and their episodes."""
