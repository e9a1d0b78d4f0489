"""Bring trajectories and runs from one place to another."""
