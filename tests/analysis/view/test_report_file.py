"""The report is one file that is whole, bounded, safe, and says what the run's figures say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from analysis import write_report_file
from analysis.view.panel import Panel
from analysis.view.report_file import MAX_BYTES, MAX_PANEL_BYTES, _bounded, is_report
from analysis.view.report_summary import answers
from cli.__main__ import main
from driver import train_run
from store import RunLayout, StoreError, open_run
from tests.analysis.view.conftest import play_one_more
from tests.support.store_runs import copy_run


@pytest.fixture(scope="module")
def report(layout: RunLayout, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report_file(layout.root, output=tmp_path_factory.mktemp("reports") / "report.html")


def test_the_sentences_have_the_figures_of_the_run(report: Path) -> None:
    shown = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", report.read_text().replace("&nbsp;", " "))
    # Step 1 consumed two groups, of which one of two episodes was won. The held-out one was won.
    assert dict(shown[:5]) == {
        "Did it learn?": "Training tasks: 50 % (50 % to 50 %) won, over 1 learner step. "
        "Held-out tasks: 100 % won by version 2 (21 % to 100 %; 1 of 1 episodes).",
        "Is it stable?": "On at the newest learner step: entropy.",
        "What limits it?": "The actors (the learner waits 62%), over 4 s.",
        "What was dropped?": "25 % of 8 groups: 1 filtered, 1 stale; 1 were trained on.",
        "Can it be trusted?": "No group was too stale, no task is in both splits. Weights that "
        "played were 1.0 versions old on average, 1 at most.",
    }


def test_a_difference_is_called_chance_where_it_may_be() -> None:
    row = {
        "first_success": 0.5,
        "first_error": 0.1,
        "last_success": 0.7,
        "last_error": 0.1,
        "n_steps": 20,
        "heldout": [{"task_id": f"{at}", "won": int(at == 0), "played": 1} for at in range(10)],
        "first_version": 1,
        "first_heldout": 0.2,
        "heldout_version": 9,
        "alarms_on": None,
        "alarms_ever": ["ess"],
        "step_s": None,
        "waits": None,
        "n_groups": 3,
        "filtered": 0,
        "stale": 0,
        "abandoned": 0,
        "trained": 3,
        "too_stale": 2,
        "in_both_splits": 0,
        "oldest": 3,
        "mean_staleness": 1.0,
    }
    said = dict(answers(row))
    # The error of the difference is 1.96 * sqrt(0.1^2 + 0.1^2) = 0.28, more than 0.2.
    assert "The difference may be chance." in said["Did it learn?"]
    assert (
        "by version 9 (2 % to 40 %; 1 of 10 episodes), after 20 % by version 1."
        in (said["Did it learn?"])
    )
    assert "It does better on the tasks that it trains on." in said["Did it learn?"]
    assert "The difference may be chance." not in answers(row | {"last_success": 0.8})[0][1]
    assert said["Is it stable?"] == "No alarm is on now. Some were on before: ess."
    assert said["What was dropped?"] == "None of 3 groups."
    assert said["Can it be trusted?"].startswith("No: 2 groups were trained on although")


def test_every_panel_answers_and_shows_its_query(report: Path) -> None:
    text = report.read_text()
    panels = re.findall(
        r'<section class="panel (?:half|full)" id="([^"]+)">(.*?)</section>', text, re.S
    )
    assert len(panels) == 20
    for name, panel in panels:
        assert 'class="error"' not in panel, name
        assert "gigpo sql" in panel, name
    assert "<td>a</td><td>1</td><td>–</td>" in text, "the one setting that this run has"
    assert "gigpo train --fork" in text and "@1" in text, "the checkpoint after the roll-back"


def test_a_report_is_bounded_and_loads_nothing(report: Path, layout: RunLayout) -> None:
    text = report.read_text()
    assert len(text) < MAX_BYTES
    without_scripts = re.sub(r"<script>.*?</script>", "", text, flags=re.S)
    assert "default-src &#39;none&#39;; script-src &#39;sha256-" in without_scripts
    assert "unsafe-eval" not in without_scripts
    assert not re.search(r"""(src|href|action)=["'](?!#|data:,)""", without_scripts)
    assert "<script>alert" not in text and "run<b>" not in without_scripts
    assert not re.search("[\x00-\x08\x1b\u202a-\u202e\u2066-\u2069\u200b]", without_scripts)
    panel = Panel(
        title="Long",
        explains="Rows that no file holds.",
        query="SELECT repeat('<', 19000) AS text FROM range(500)",
    )
    with open_run(layout.root) as reader:

        def ask(
            query: str, n_rows: int | None = None, *, tables: Sequence[tuple[str, str]] = ()
        ) -> pa.Table:
            return reader.sql(query)

        shown = _bounded(panel, ask, run="RUN", lsn=1)
    assert len(shown) <= MAX_PANEL_BYTES
    assert "Too long to show all: 1 of 500 rows." in shown


def test_a_moment_gives_the_same_figures_again(layout: RunLayout, tmp_path: Path) -> None:
    copy = copy_run(layout, tmp_path / "copy")
    with open_run(copy.root) as reader:
        lsn = reader.lsn
    play_one_more(copy.root)
    then = write_report_file(copy.root, output=tmp_path / "then.html", as_of=lsn).read_text()
    now = write_report_file(copy.root, output=tmp_path / "now.html").read_text()
    assert "25&nbsp;% of 8 groups" in then and "22&nbsp;% of 9 groups" in now
    with pytest.raises(StoreError):
        write_report_file(copy.root, output=tmp_path / "gone.html", as_of=99_999_999)
    assert not (tmp_path / "gone.html").exists()


def test_only_a_report_is_replaced(
    layout: RunLayout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_run(layout, tmp_path / "copy").root
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run}/report.html\n"
    assert is_report(run / "report.html")
    assert main(["report", str(run)]) == 0, "it is a report, so it is made anew"
    mine = tmp_path / "mine.html"
    mine.write_text("my notes")
    link = tmp_path / "link.html"
    link.symlink_to(tmp_path / "a report")
    (tmp_path / "a report").write_bytes((run / "report.html").read_bytes())
    for other, words in [
        (mine, "is no report"),
        (link, "is no report"),
        (run / "weights" / "x.html", "is inside the run"),
        (tmp_path / "none" / "x.html", "there is no directory"),
        (tmp_path, "is a directory"),
    ]:
        assert main(["report", str(run), "--output", str(other)]) == 2
        assert words in capsys.readouterr().err
    assert mine.read_text() == "my notes"
    assert main(["report", str(run), "--output", str(mine), "--overwrite"]) == 0
    assert is_report(mine)
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_report_that_fails_is_one_line_and_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(run: Path) -> Path:
        raise MemoryError("no room\nat all")

    monkeypatch.setattr(train_run, "write_report_file", fail)
    said: list[str] = []
    assert train_run._report_file(tmp_path, said.append) is None
    assert said == [
        f"the report of {tmp_path} could not be written: no room at all; try: gigpo report "
        f"{tmp_path}"
    ]
