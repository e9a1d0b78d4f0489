"""analysis/setting_comparison.py: what two settings would have trained on differently."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

import pyarrow as pa
import pytest

from analysis import setting_comparison as comparison
from analysis.setting_comparison import (
    CHANGE_KINDS,
    NO_BATCH,
    Span,
    change_kinds,
    plot_settings,
    spans,
)

SVG = "{http://www.w3.org/2000/svg}"


def rows(steps: Sequence[tuple[int | None, float | None, float | None]]) -> pa.Table:
    """(learner step, advantage under a, under b); an advantage of None is of a group that is left
    out.
    """
    learner_step, a, b = zip(*steps, strict=True)
    return pa.table(
        {
            "learner_step": pa.array(learner_step, pa.int64()),
            # one that is left out has an advantage all the same
            "advantage_a": [value or 0.5 for value in a],
            "advantage_b": [value or 0.5 for value in b],
            "passes_filter_a": [value is not None for value in a],
            "passes_filter_b": [value is not None for value in b],
        }
    )


@pytest.mark.parametrize(
    ("a", "b", "fate"),
    [
        (None, 1.0, "trained by b alone"),
        (1.0, None, "trained by a alone"),
        (1.0, -1.0, "another sign"),
        (0.01, -0.01, "another sign"),
        (1.0, 1.2, "other by over 10%"),
        (-1.2, -1.0, "other by over 10%"),
        (1.0, 1.09, "as good as the same"),
        (-1e-9, -1e-9, "as good as the same"),
        (None, None, "as good as the same"),
    ],
)
def test_what_becomes_of_a_step(a: float | None, b: float | None, fate: str) -> None:
    assert [CHANGE_KINDS[code] for code in change_kinds(rows([(1, a, b)]))] == [fate]


def test_a_zero_and_a_small_advantage_have_other_signs() -> None:
    table = (
        rows([(1, 1.0, 1.0)])
        .set_column(1, "advantage_a", [[0.0]])
        .set_column(2, "advantage_b", [[0.001]])
    )
    assert [CHANGE_KINDS[code] for code in change_kinds(table)] == ["another sign"], (
        "one pushes and the other does not"
    )


def test_shares_are_by_learner_step_and_what_no_batch_had_comes_last() -> None:
    table = rows(
        [
            (None, 1.0, 1.0),
            (7, 1.0, -1.0),
            (2, 1.0, 1.0),
            (7, None, 1.0),
            (2, 1.0, 2.0),
            (7, 1.0, 1.0),
            (2, 1.0, 1.0),
        ]
    )
    third = pytest.approx(1 / 3)
    assert spans(table, at_most=20) == [
        Span(name="2", n_steps=3, shares=(0.0, 0.0, 0.0, third, pytest.approx(2 / 3))),
        Span(name="7", n_steps=3, shares=(third, 0.0, third, 0.0, third)),
        Span(name=NO_BATCH, n_steps=1, shares=(0.0, 0.0, 0.0, 0.0, 1.0)),
    ]


def test_a_long_run_is_summed_up() -> None:
    table = rows([(step, 1.0, 1.0) for step in range(3, 50)])
    assert [span.name for span in spans(table, at_most=5)] == [
        "3 to 12",
        "13 to 22",
        "23 to 32",
        "33 to 42",
        "43 to 49",
    ]
    assert sum(span.n_steps for span in spans(table, at_most=5)) == 47
    assert [span.name for span in spans(rows([(None, 1.0, 1.0)]), at_most=5)] == [NO_BATCH]


def test_bars_of_a_plot_are_as_high_as_the_shares() -> None:
    table = rows(
        [(1, 1.0, -1.0), (1, 1.0, 1.0), (2, 1.0, 1.2), (2, 1.0, -1.0), (2, 1.0, 1.0), (2, 1.0, 1.0)]
    )
    root = ElementTree.fromstring(plot_settings(table, ["a<b", "b"]))
    bars = root.findall(f"{SVG}g")
    heights = [[float(box.attrib["height"]) for box in bar.findall(f"{SVG}rect")] for bar in bars]
    full = comparison.HEIGHT - comparison.TOP - comparison.BOTTOM
    assert heights == [[0.0, 0.0, full, 0.0], [0.0, 0.0, full / 2, full / 2]], (
        "both are half: that is the upper edge"
    )
    lowest = [
        float(box.attrib["y"]) + float(box.attrib["height"])
        for box in bars[1].findall(f"{SVG}rect")
    ]
    assert lowest == [comparison.TOP + full] * 3 + [comparison.TOP + full / 2], "stacked"
    assert any("a (a<b)" in (text.text or "") for text in root.iter(f"{SVG}text"))
    assert "another sign 50.0%" in (bars[0].findtext(f"{SVG}title") or "")


def test_a_plot_of_no_difference_is_empty() -> None:
    bars = ElementTree.fromstring(plot_settings(rows([(1, 1.0, 1.0)]), ["a", "b"])).findall(
        f"{SVG}g"
    )
    assert [box.attrib["height"] for box in bars[0].findall(f"{SVG}rect")] == ["0.00"] * 4
