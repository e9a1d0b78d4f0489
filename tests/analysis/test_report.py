"""Print the summary at the end of a run."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import driver
from analysis import report
from analysis.view.pages import run as run_page
from analysis.view.sql_text import fill
from configs import Config, EnvConfig, ModelConfig, as_yaml
from driver.screen import shown_in
from store import Catalog, CheckpointRecord, RunLayout, VersionRecord, export, write_open_sql
from tests.support.run_views import connect
from tests.support.store_samples import play


def test_a_run_is_finished_when_it_is_trained_and_evaluated(tmp_path: Path) -> None:
    config = Config(run_dir=str(tmp_path / "run"))
    at_3, offline = (
        replace(config, learner=replace(config.learner, steps=3)),
        replace(config, source=["elsewhere"]),
    )
    assert not report.is_finished(at_3), "there is none yet"
    layout = RunLayout.create(tmp_path / "run", config_yaml=as_yaml(config))
    write_open_sql(layout, macros=(), max_staleness=1)
    assert (report.trained_to(at_3), report.is_finished(at_3)) == (0, False), (
        "it has no catalog yet"
    )
    with Catalog.open(layout) as catalog:
        for step in (2, 4):
            catalog.record_version(
                VersionRecord(version=step, path=f"weights/v{step}", digest="d", learner_step=step)
            )
            catalog.record_checkpoint(
                CheckpointRecord(learner_step=step, path=f"checkpoints/step{step}", version=step)
            )
        export(catalog, layout)
        assert (report.trained_to(at_3), report.is_finished(at_3)) == (4, False)
        assert report.is_finished(
            replace(offline, learner=at_3.learner, offline=replace(config.offline, share=1.0))
        )
        catalog.record_metrics(learner_step=4, policy_version=4, values={"heldout/success": 0.5})
        export(catalog, layout)
        assert report.is_finished(at_3)
        assert not report.is_finished(replace(config, learner=replace(config.learner, steps=5)))


def test_fewer_steps_than_were_trained_are_said(tmp_path: Path) -> None:
    key_room = EnvConfig(name="key_room", options={})
    config = replace(
        Config(run_dir=str(tmp_path / "run"), env=key_room),
        model=ModelConfig(path=str(tmp_path)),
    )
    (tmp_path / "config.json").write_text("{}")
    layout = RunLayout.create(tmp_path / "run", config_yaml=as_yaml(config))
    write_open_sql(layout, macros=(), max_staleness=1)
    with Catalog.open(layout) as catalog:
        catalog.record_version(
            VersionRecord(version=1, path="weights/v1", digest="d", learner_step=4)
        )
        catalog.record_checkpoint(
            CheckpointRecord(learner_step=4, path="checkpoints/step4", version=1)
        )
        catalog.record_metrics(learner_step=4, policy_version=1, values={"heldout/success": 0.5})
        export(catalog, layout)
    line = f"{tmp_path}/run is trained to learner step 4 already, so learner.steps=3 trains nothing"
    for steps, is_said in ((3, True), (4, False)):
        said = StringIO()
        driver.train(
            replace(config, learner=replace(config.learner, steps=steps)),
            shown_in(Console(file=said, width=500)),
        )
        assert (line in said.getvalue()) == is_said


def test_an_unfinished_round_of_held_out_tasks_is_called_that(tmp_path: Path) -> None:
    config = Config(run_dir=str(tmp_path / "run"))
    layout = RunLayout.create(tmp_path / "run", config_yaml=as_yaml(config))
    write_open_sql(layout, macros=(), max_staleness=1)
    printed = []
    with Catalog.open(layout) as catalog:
        catalog.record_version(
            VersionRecord(version=0, path="weights/v0", digest="d", learner_step=None)
        )
        catalog.open_round(["a", "b"], episodes_per_task=1, version=0)
        for _ in range(2):
            group = catalog.lease_open_group(worker="w0", lease_s=60.0)
            assert group is not None
            play(layout, catalog, group)
            export(catalog, layout)
            said = StringIO()
            report.show_report(config, Console(file=said, width=200))
            printed.append(said.getvalue())
    assert "of an unfinished round: 1 episodes were not played" in printed[0]
    assert "of an unfinished round" not in printed[1]


def test_the_closing_lines_have_an_ordered_query_and_how_long_it_took(tmp_path: Path) -> None:
    config = Config(run_dir=str(tmp_path / "run"))
    layout = RunLayout.create(tmp_path / "run", config_yaml=as_yaml(config))
    write_open_sql(layout, macros=(), max_staleness=1)
    with Catalog.open(layout) as catalog:
        for step in (3, 1, 2):
            values = {
                "train/success": step / 10,
                "time/step_s": 100.0 * step,
                "time/advantages_cpu_s": 1.0,
            }
            catalog.record_metrics(learner_step=step, policy_version=step, values=values)
        export(catalog, layout)
    said = StringIO()
    report.show_report(config, Console(file=said, width=500))
    printed = said.getvalue()
    assert "3 learner steps took 10 min, one of them 200.00 s (median)" in printed
    assert "advantages" not in printed
    (query,) = re.findall(r'gigpo sql \S+ "(.*)"', printed)
    with connect(layout) as connection:
        assert connection.sql(query).fetchall() == [(1, 0.1), (2, 0.2), (3, 0.3)]


def test_each_environment_of_a_run_has_its_success(tmp_path: Path) -> None:
    """Six batches, of which the newest five count, and two evaluations, of which the newest counts."""
    config = Config(
        run_dir=str(tmp_path / "run"), environments={"rooms": {}, "lakes": {}, "new": {}}
    )
    layout = RunLayout.create(tmp_path / "run", config_yaml=as_yaml(config))
    write_open_sql(layout, macros=(), max_staleness=1)
    with Catalog.open(layout) as catalog:
        for step in range(6):
            values = {"train/success/rooms": step / 10}
            if step in (2, 4):
                values |= {"heldout/success/rooms": step / 8, "heldout/success/lakes": 1.0}
            catalog.record_metrics(learner_step=step, policy_version=step, values=values)
        export(catalog, layout)
    said = StringIO()
    report.show_report(config, Console(file=said, width=200))
    assert "  rooms: 0.30 on training tasks, 0.50 on held-out tasks\n" in said.getvalue()
    assert "  lakes: 1.00 on held-out tasks\n  new: nothing was played yet\n" in said.getvalue()
    with connect(layout) as connection:
        shown = connection.sql(fill(run_page.BY_ENVIRONMENT, steps=run_page.RECENT_STEPS))
        assert shown.fetchall() == [("lakes", None, 1.0), ("rooms", pytest.approx(0.3), 0.5)]
