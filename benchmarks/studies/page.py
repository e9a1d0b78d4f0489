"""Write a study's page and its picture from the stored results. Equal results give equal bytes."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.studies import NAMES
from benchmarks.studies.intervals import Interval, bootstrap, paired
from benchmarks.studies.runner import Row, read
from benchmarks.studies.study import ROOT, Study, load
from benchmarks.studies.svg import curves_svg, points_svg

EVIDENCE = ROOT / "docs" / "evidence"
MADE = "Made from stored results by `gigpo study {name} --page`; edit the study, not this page."
INDEX = """\
**Does GiGPO win here?** In a corridor with recurring states it learns faster than its episode term
alone, and the gap is larger where success is further away ([horizon](horizon.md)). It is not the
best estimator there: G2PO learns faster, and its advantages are much nearer to the true ones
([advantage_accuracy](advantage_accuracy.md)). Where no state recurs it is GRPO, bit for bit
([negative_control](negative_control.md)).

**Does asynchrony cost anything?** With {staleness_seeds} seeds we see no cost of training on
episodes that are one version old. Older episodes slow learning ([staleness](staleness.md)). On two
cores an asynchronous learner step of the quick start takes two thirds of a synchronous one's time
([performance](../performance.md)).

![Success over learner steps, by estimator and distance](horizon.svg)

![Correlation of estimated with true advantages](advantage_accuracy.svg)

All runs are small. They show what these algorithms do in worlds where a run takes seconds, and not
what they do with a large model. Each page has the question, the prediction that was written before
the first run, the settings, a table with intervals, a picture, a reading and the cost.
`gigpo study NAME` repeats it. This page is made by `gigpo study NAME --page`.

**Not run:** a replication of the paper's comparison on FrozenLake, Sokoban and 200 ALFWorld games
with three seeds each, which needs days of two cores, and episodes that are dropped beside episodes
that are waited for."""
WIDTH = 140  # characters, as in the other pages
# A figure in a reading. Not str.format: the names of arms have dots in them.
QUOTED = re.compile(r"\{(?P<arms>[^{}\[]+)\[(?P<measure>\w+)\]\}")

Values = Mapping[tuple[str, str], Mapping[int, float]]  # (arm, measure) -> seed -> value


def write_page(study: Study) -> Path:
    """Write `docs/evidence/NAME.md` and `NAME.svg`. Return the page's path."""
    rows, page = read(study), EVIDENCE / f"{study.name}.md"
    EVIDENCE.mkdir(parents=True, exist_ok=True)
    page.write_text(page_text(study, rows), encoding="utf-8")
    if rows:
        page.with_suffix(".svg").write_text(picture(study, rows), encoding="utf-8")
    return page


def write_index() -> None:
    """Write `docs/evidence/index.md`: what each study found so far."""
    EVIDENCE.mkdir(parents=True, exist_ok=True)
    (EVIDENCE / "index.md").write_text(index_text(), encoding="utf-8")


def index_text() -> str:
    index = INDEX.format(staleness_seeds=load("staleness").seeds)
    parts = ["# What the studies found", _filled(index)]
    for study in map(load, NAMES):
        rows = read(study)
        n_wanted = len(study.arms) * study.seeds
        parts += [
            f"## [{study.title}]({study.name}.md)",
            f"**Question.** {_filled(study.question)}",
            _reading(study, values_of(rows)) if rows else "No run is finished yet.",
            f"{len(rows)} of {n_wanted} runs.",
        ]
    return "\n\n".join(parts) + "\n"


def page_text(study: Study, rows: Sequence[Row]) -> str:
    parts = [
        f"# {study.title}",
        MADE.format(name=study.name),
        f"**Question.** {_filled(study.question)}",
        f"**Prediction, written before the first run.** {_filled(study.prediction)}",
        f"**A run.** {_filled(study.setup)}",
    ]
    if not rows:
        return "\n\n".join([*parts, "No run is finished yet."]) + "\n"
    values = values_of(rows)
    parts += [f"![{study.title}]({study.name}.svg)", _means_table(study, values)]
    if study.comparisons:
        parts.append(_differences_table(study, values))
    parts += [
        "\n".join(f"- `{name}`: {text}" for name, text in study.measures.items()),
        _reading(study, values),
        _cost(study, rows),
    ]
    return "\n\n".join(parts) + "\n"


def _reading(study: Study, values: Values) -> str:
    summary = _Summary(study, values)
    reading = QUOTED.sub(lambda found: summary[found["arms"]][found["measure"]], study.reading)
    return f"**Reading.** {_filled(reading)}"


def values_of(rows: Sequence[Row]) -> Values:
    values: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        for name, value in row.measures.items():
            if not isinstance(value, str):
                values.setdefault((row.arm, name), {})[row.seed] = value
    return values


def picture(study: Study, rows: Sequence[Row]) -> str:
    """Return an SVG: mean curves of each panel's arms, or the first measure of every arm."""
    if study.curve:
        panels: dict[str, dict[str, list[list[float]]]] = {}
        for arm in study.arms:
            curves = [row.curve for row in rows if row.arm == arm.name]
            if curves:
                panels.setdefault(arm.panel, {})[arm.label or arm.name] = curves
        return curves_svg(panels, title=study.title, y_label=study.curve)
    measure = next(iter(study.measures))
    values = values_of(rows)
    points = [
        (arm.name, bootstrap(list(values[arm.name, measure].values())))
        for arm in study.arms
        if (arm.name, measure) in values
    ]
    return points_svg(points, title=study.title, x_label=study.measures[measure])


class _Summary(dict[str, Mapping[str, str]]):
    """Look up the texts that a reading may quote: by arm, or by `arm - other`, then by measure."""

    def __init__(self, study: Study, values: Values) -> None:
        super().__init__()
        for arm in study.arms:
            found = {name: values.get((arm.name, name)) for name in study.measures}
            self[arm.name] = {
                name: show(bootstrap(list(one.values())), study.numbers)
                for name, one in found.items()
                if one
            }
        for arms in study.comparisons:
            contrasts = {name: _contrast(values, arms, name) for name in study.measures}
            self[" - ".join(arms)] = {
                name: show(one, "+" + study.numbers) for name, one in contrasts.items() if one
            }


def show(interval: Interval, form: str) -> str:
    """Return `0.910 [0.880, 0.940]`; without brackets if all runs agree or there is one."""
    mean, low, high = (f"{value:{form}}" for value in (interval.mean, interval.low, interval.high))
    return mean if low == high else f"{mean} [{low}, {high}]"


def _contrast(values: Values, arms: Sequence[str], measure: str) -> Interval | None:
    return paired([values.get((arm, measure), {}) for arm in arms])


def _means_table(study: Study, values: Values) -> str:
    lines = [_line("arm", "runs", *study.measures), _line("---", *["---:"] * (1 + _n(study)))]
    for arm in study.arms:
        found = [values.get((arm.name, measure)) for measure in study.measures]
        n_runs = max((len(one) for one in found if one), default=0)
        cells = [show(bootstrap(list(one.values())), study.numbers) if one else "" for one in found]
        lines.append(_line(arm.name, str(n_runs), *cells))
    return "\n".join(["Means over seeds, with 95% intervals:", "", *lines])


def _differences_table(study: Study, values: Values) -> str:
    lines = [_line("arms", "pairs", *study.measures), _line("---", *["---:"] * (1 + _n(study)))]
    for arms in study.comparisons:
        found = [_contrast(values, arms, measure) for measure in study.measures]
        n_pairs = max((one.n for one in found if one), default=0)
        cells = [show(one, "+" + study.numbers) if one else "" for one in found]
        name = " − ".join(arms[:2]) + (f" − ({' − '.join(arms[2:])})" if arms[2:] else "")
        lines.append(_line(name, str(n_pairs), *cells))
    return "\n".join(["Differences, paired by seed:", "", *lines])


def _n(study: Study) -> int:
    return len(study.measures)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _cost(study: Study, rows: Sequence[Row]) -> str:
    if study.is_timed:
        cost = f"{sum(float(row.measures['wall_s']) for row in rows) / 3600:.2g} hours of two cores"
    else:
        cost = f"{sum(row.cpu_s for row in rows) / 3600:.2g} core-hours"
    commits = ", ".join(f"`{commit}`" for commit in dict.fromkeys(row.commit for row in rows))
    lines = f"../../benchmarks/studies/results/{study.name}.jsonl"
    code = f"../../benchmarks/studies/{study.name}.py"
    return (
        f"**Cost.** {cost} in {len(rows)} runs, at commit {commits} (+ means that "
        "sources differed from it). Intervals are percentiles of 10,000 bootstrap resamples of the "
        f"seeds.\n[The runs]({lines}), one line each; [the study]({code}). "
        f"`gigpo study {study.name}` runs what is missing; without the first file, all of it."
    )


def _filled(text: str) -> str:
    paragraphs = textwrap.dedent(text).strip().split("\n\n")
    return "\n\n".join(
        textwrap.fill(" ".join(part.split()), WIDTH, break_on_hyphens=False) for part in paragraphs
    )
