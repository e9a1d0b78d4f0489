"""Compute from a stored run what people want to see of it.

run_status.py          how far a run is
speed_limit.py         which side the other waits for
report.py              the summary that is printed at the end of a training
evaluation_stats.py    success on held-out tasks with intervals, and two evaluations compared
audit.py               advantages of a run under other settings
setting_comparison.py  which steps two settings train differently, as tables and as a plot
bias/                  the trajectories that were dropped, against those trained on
view/                  pages that show a run in a browser, and a file of them
"""

from analysis.audit import (
    Setting,
    audit_rows,
    changed_setting,
    describe_settings,
    run_setting,
    show_audit,
)
from analysis.bias.report import BiasReport, Comparison, bias_report
from analysis.evaluation_stats import show_evaluation, show_evaluation_comparison
from analysis.report import is_finished, show_report, trained_to
from analysis.run_status import duration, progress_lines, success_metric
from analysis.setting_comparison import plot_settings
from analysis.speed_limit import speed_limit
from analysis.view import serve_view, write_report_file

__all__ = [
    "BiasReport",
    "Comparison",
    "Setting",
    "audit_rows",
    "bias_report",
    "changed_setting",
    "describe_settings",
    "duration",
    "is_finished",
    "plot_settings",
    "progress_lines",
    "run_setting",
    "serve_view",
    "show_audit",
    "show_evaluation",
    "show_evaluation_comparison",
    "show_report",
    "speed_limit",
    "success_metric",
    "trained_to",
    "write_report_file",
]
