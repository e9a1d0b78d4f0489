"""Measure whether what was dropped differs from what was trained on."""
