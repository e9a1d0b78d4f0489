"""What is printed at the end of a run."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from rich.console import Console

import report
from configs import Config, to_yaml
from store import Catalog, RunLayout, export, write_open_sql
from tests.store_samples import play


def test_an_unfinished_round_of_held_out_tasks_is_called_that(tmp_path: Path) -> None:
    config = Config(run_dir=str(tmp_path / "run"))
    layout = RunLayout.create(tmp_path / "run", config_yaml=to_yaml(config))
    write_open_sql(layout, macros=(), max_staleness=1)
    printed = []
    with Catalog.open(layout) as catalog:
        catalog.record_version(version=0, path="w0", digest="d", learner_step=None)
        catalog.open_round(["a", "b"], episodes_per_task=1, version=0)
        for _ in range(2):
            group = catalog.lease_open_group(worker="w0", lease_s=60.0)
            assert group is not None
            play(layout, catalog, group)
            export(catalog, layout)
            said = StringIO()
            report.show(config, Console(file=said, width=200))
            printed.append(said.getvalue())
    assert "of an unfinished round: 1 episodes were not played" in printed[0]
    assert "of an unfinished round" not in printed[1]
