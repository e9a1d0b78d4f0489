"""Write a study's page and its picture from the stored results. Equal results give equal bytes."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.studies.intervals import Interval, bootstrap, paired, ratio
from benchmarks.studies.runner import Row, read
from benchmarks.studies.study import ROOT, Study
from benchmarks.studies.svg import curves_svg, points_svg

EVIDENCE = ROOT / "docs" / "evidence"
MADE = "Made from stored results by `gigpo study {name} --page`; edit the study, not this page."
WIDTH = 140  # characters, as in the other pages
# A figure in a reading. Not str.format: the names of arms have dots in them.
# The index names the study as well: {horizon: gigpo/8 - grpo/8[mean]}.
QUOTED = re.compile(r"\{(?:(?P<study>\w+): )?(?P<arms>[^{}\[]+)\[(?P<measure>\w+)\]\}")

Values = Mapping[tuple[str, str], Mapping[int, float]]  # (arm, measure) -> seed -> value


def write_page(study: Study) -> Path:
    """Write `docs/evidence/NAME.md` and `NAME.svg`. Return the page's path."""
    rows, page = read(study), EVIDENCE / f"{study.name}.md"
    EVIDENCE.mkdir(parents=True, exist_ok=True)
    page.write_text(page_text(study, rows), encoding="utf-8")
    if rows:
        page.with_suffix(".svg").write_text(picture(study, rows), encoding="utf-8")
    return page


def page_text(study: Study, rows: Sequence[Row]) -> str:
    parts = [
        f"# {study.title}",
        MADE.format(name=study.name),
        f"**Question.** {filled(study.question)}",
        f"**Prediction, written before the first run.** {filled(study.prediction)}",
        f"**A run.** {filled(study.setup)}",
    ]
    if not rows:
        return "\n\n".join([*parts, "No run is finished yet."]) + "\n"
    values = values_of(rows)
    parts += [f"![{study.title}]({study.name}.svg)", _means_table(study, values)]
    if study.comparisons:
        parts.append(_differences_table(study, values))
    parts += [
        "\n".join(f"- `{name}`: {text}" for name, text in study.measures.items()),
        reading_of(study, values),
        _cost(study, rows),
    ]
    return "\n\n".join(parts) + "\n"


def reading_of(study: Study, values: Values) -> str:
    summary = Summary(study, values)
    reading = QUOTED.sub(lambda found: summary[found["arms"]][found["measure"]], study.reading)
    return f"**Reading.** {filled(reading)}"


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


class Summary(dict[str, Mapping[str, str]]):
    """Look up the texts that a reading may quote, by arms and then by measure.

    Arms are `arm`, `arm - other`, or `arm / other`, which is the mean of the ratios by seed.
    """

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
            if len(arms) == 2:
                self[" / ".join(arms)] = _ratios(study, values, arms)


def _ratios(study: Study, values: Values, arms: Sequence[str]) -> dict[str, str]:
    ratios = {
        name: ratio(*(values.get((arm, name), {}) for arm in arms)) for name in study.measures
    }
    return {name: show(one, study.numbers) for name, one in ratios.items() if one}


def show(interval: Interval, form: str) -> str:
    """Return `0.910 [0.880, 0.940]`; without brackets if all runs agree or there is one."""
    mean, low, high = (f"{value:{form}}" for value in (interval.mean, interval.low, interval.high))
    return mean if low == high else f"{mean} [{low}, {high}]"


def _contrast(values: Values, arms: Sequence[str], measure: str) -> Interval | None:
    return paired([values.get((arm, measure), {}) for arm in arms])


def _means_table(study: Study, values: Values) -> str:
    lines = [
        table_line("arm", "runs", *study.measures),
        table_line("---", *["---:"] * (1 + _n(study))),
    ]
    for arm in study.arms:
        found = [values.get((arm.name, measure)) for measure in study.measures]
        n_runs = max((len(one) for one in found if one), default=0)
        cells = [show(bootstrap(list(one.values())), study.numbers) if one else "" for one in found]
        lines.append(table_line(arm.name, str(n_runs), *cells))
    return "\n".join(["Means over seeds, with 95% intervals:", "", *lines])


def _differences_table(study: Study, values: Values) -> str:
    lines = [
        table_line("arms", "pairs", *study.measures),
        table_line("---", *["---:"] * (1 + _n(study))),
    ]
    for arms in study.comparisons:
        found = [_contrast(values, arms, measure) for measure in study.measures]
        n_pairs = max((one.n for one in found if one), default=0)
        cells = [show(one, "+" + study.numbers) if one else "" for one in found]
        name = " − ".join(arms[:2]) + (f" − ({' − '.join(arms[2:])})" if arms[2:] else "")
        lines.append(table_line(name, str(n_pairs), *cells))
    return "\n".join(["Differences, paired by seed:", "", *lines])


def _n(study: Study) -> int:
    return len(study.measures)


def table_line(*cells: str) -> str:
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


def filled(text: str) -> str:
    paragraphs = textwrap.dedent(text).strip().split("\n\n")
    return "\n\n".join(
        textwrap.fill(" ".join(part.split()), WIDTH, break_on_hyphens=False) for part in paragraphs
    )
