"""What is computed from a stored run for people: statistics, comparisons, the report."""

from analysis.run_status import duration, progress_lines

__all__ = ["duration", "progress_lines"]
