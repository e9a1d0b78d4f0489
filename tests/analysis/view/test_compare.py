"""Two runs side by side: figures of both, tasks that one alone won, settings that differ."""

from __future__ import annotations

import html
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from starlette.testclient import TestClient

import configs
from analysis.view.pages import compare
from analysis.view.pages.compare import SHOWN_KINDS, SIDE, heldout_sentence, show_kinds
from analysis.view.run_settings import differing, settings_of
from analysis.view.server import make_app
from configs import ConfigError
from store import Catalog, RunLayout, StoreError, export, write_segment
from tests.analysis.view.conftest import TOKEN, play_one_more
from tests.support.store_runs import copy_run
from tests.support.store_samples import make_trajectory, open_task_group

ONLY_SECOND = "maze-<i>7"


def play_member(root: Path, member: int) -> None:
    """Play one member of a group. Member 0 wins, member 1 does not."""
    layout = RunLayout.open(root)
    with Catalog.open(layout) as catalog:
        group = open_task_group(catalog, ONLY_SECOND, size=2)
        played = [make_trajectory(group, member, version=2)]
        catalog.commit(
            write_segment(layout, played, worker="w0", epoch=catalog.epoch), epoch=catalog.epoch
        )
        export(catalog, layout)


@pytest.fixture(scope="module")
def two(layout: RunLayout, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("two")
    roots = directory / "run<b>first", directory / "second"
    for member, root in zip((1, 0), roots, strict=True):
        copy_run(layout, root)
        play_member(root, member)
    (roots[1] / "config.yaml").write_text("a: 2\nb: [1, <script>alert(1)</script>]\n")
    return roots


@pytest.fixture(scope="module")
def client(two: tuple[Path, Path]) -> Iterator[TestClient]:
    with TestClient(make_app(two, token=TOKEN), base_url="http://127.0.0.1") as client:
        yield client


def text_of(page: str) -> str:
    """The words of a page, with one space between any two."""
    without = re.sub(r"<script.*?</script>|<pre.*?</pre>", " ", page, flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", without)).split())


def test_figures_of_both_runs(client: TestClient) -> None:
    page = client.get("/compare").text
    shown = text_of(page)
    assert 'class="error"' not in page and "<script>alert" not in page and "run<b>" not in page
    # Step 1 consumed two groups; half of their four episodes were won.
    # The two tasks do not differ, so the interval is Wilson's of 1 in 2: one for each task.
    assert "training task 50 % (9 % to 91 %), 4 50 % (9 % to 91 %), 4" in shown
    assert "held out h 100 % (21 % to 100 %), 1 100 % (21 % to 100 %), 1" in shown
    assert "learner step 1 1 version" in shown
    assert "On 1 held-out tasks in common run<b>first wins 100 % and second wins 100 %" in shown
    # task-0 to task-4, task-6, the hostile one and h; task-0 was drawn again.
    assert "0 were won by run<b>first only and 1 by second only." in shown
    assert "Both won 8, neither won 0." in shown
    assert f"{ONLY_SECOND} training 0 of 1 1 of 1" in shown
    assert "a 1 2 b – [1, '<script>alert(1)</script>']" in shown


def test_the_name_of_a_run_is_no_template_of_a_tooltip(client: TestClient) -> None:
    page = client.get("/compare").text
    later = re.findall(r'data-later="([^"]+)"', page)
    texts = [page, *(client.get(html.unescape(address)).text for address in later)]
    tips = re.findall(r'\[\s*"run",\s*"([^"]*)"\s*\]', " ".join(texts))
    assert set(tips) == {"@run"}


def test_counts_lead_to_the_groups_of_their_run(client: TestClient) -> None:
    page = client.get("/compare").text
    links = [
        html.unescape(each) for each in re.findall(r'<a href="([^"]*groups[^"]*maze[^"]*)"', page)
    ]
    assert len(links) == 2
    for link, won in zip(links, (0, 1), strict=True):
        (row,) = re.findall(r"<tr><td>.*?</tr>", client.get(link).text, re.S)
        assert f'<td class="number">{won}</td><td class="number">1</td>' in re.sub(
            r">\s+<", "><", row
        )
    # Seen from the second run, the first is the other one.
    assert "0 were won by second only and 1" not in text_of(client.get("/compare?run=1").text)
    assert "1 were won by second only and 0 by run<b>first only." in text_of(
        client.get("/compare?run=1").text
    )


def test_an_address_names_the_moments_of_both(two: tuple[Path, Path], tmp_path: Path) -> None:
    copy = copy_run(RunLayout.open(two[1]), tmp_path / "second").root
    app = make_app([two[0], copy], token=TOKEN)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        page = client.get("/compare").text
        (fixed,) = re.findall(r'href="([^"]*)" title="The address of this moment', page)
        fixed = html.unescape(fixed)
        assert "as_of_1=" in fixed
        before = text_of(client.get(fixed).text)
        play_one_more(copy)
    with TestClient(make_app([two[0], copy], token=TOKEN), base_url="http://127.0.0.1") as client:
        assert text_of(client.get(fixed).text) == before
        assert text_of(client.get(fixed.replace("as_of_1", "x")).text) != before


def test_one_run_says_how_to_open_two(layout: RunLayout) -> None:
    app = make_app([layout.root], token=TOKEN)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        page = client.get("/compare").text
    assert "One run is open. Open two with" in page and 'class="error"' not in page


def test_a_bad_address_is_one_line(client: TestClient) -> None:
    for query, status in [
        ("with=7", 400),
        ("with=x", 400),
        ("as_of_1=x", 400),
        ("as_of_1=9999999", 410),
    ]:
        answer = client.get(f"/compare?{query}")
        assert answer.status_code == status and 'class="error"' in answer.text, query


def test_a_difference_of_held_out_success_may_be_chance() -> None:
    first = [{"split": "heldout", "task_id": f"{at}", "won": 0, "played": 1} for at in range(8)]
    second = [row | {"won": 1} for row in first]
    said = heldout_sentence(("a", "b"), (first, second))
    # All eight signs alike: 2 of 256 flips are as large, so p is near 0.008.
    assert "a wins 0 % and b wins 100 %: that is more than chance (p = 0.0" in said
    said = heldout_sentence(("a", "b"), (first[:2], second[:2]))
    assert "the difference may be chance (p = 0.5" in said or "(p = 0.4" in said
    assert "no held-out task in common" in heldout_sentence(("a", "b"), (first[:1], second[1:]))


def test_secrets_are_compared_and_not_shown() -> None:
    """The attack: a report that was sent had the keys of an environment's options in it."""
    first = {"env.options.api_key": "sk-1", "env.options.n": 1, "store.uri": "http://me:pw@host/x"}
    second = {"env.options.api_key": "sk-2", "env.options.n": 2, "store.uri": None}
    assert differing(first, second) == [
        ("env.options.api_key", "(not shown)", "(not shown)"),
        ("env.options.n", "1", "2"),
        ("store.uri", "http://host/x", "–"),
    ]


def test_nobody_gets_a_secret_by_a_query_or_a_file(
    client: TestClient, two: tuple[Path, Path]
) -> None:
    """The attack: the file of the panel had what the panel does not show."""
    config, own = two[0] / "config.yaml", {"sec-fetch-site": "same-origin"}
    config.write_text("env: {options: {api_key: sk-123}}\n")
    try:
        shown = client.get("/compare", params={"panel": "settings-that-differ"}).text
        assert "env.options.api_key" in shown and "(not shown)" in shown
        file = {"panel": "settings-that-differ", "download": "csv"}
        refused = client.get("/compare", params=file, headers=own)
        asked = f"SELECT content FROM read_text('{config}')"
        page = client.get("/sql", params={"q": asked}, headers=own).text
        assert refused.status_code == 400 and "Permission Error" in page
        assert "sk-123" not in shown + refused.text + page
    finally:
        config.unlink()


def test_the_settings_are_those_of_the_run_that_was_opened(
    client: TestClient, two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The attack: who owns the second run put another one in its place, whose settings were shown."""
    other = RunLayout.create(tmp_path / "other", config_yaml="a: 77777\n")
    aside = tmp_path / "aside"

    def exchange(*given: Any, **settings: Any) -> Any:
        if not aside.exists():
            two[1].rename(aside)
            other.root.rename(two[1])
        return settings_of(*given, **settings)

    monkeypatch.setattr(compare, "settings_of", exchange)
    page = client.get("/compare", params={"panel": "settings-that-differ"}).text
    shutil.rmtree(two[1])
    aside.rename(two[1])
    assert "77777" not in page and "was exchanged while it was opened" in page


def test_settings_are_parsed_once_and_not_for_who_has_left(
    client: TestClient, two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: forty clients that left had a long text parsed for minutes."""
    parsed, parse = [], configs.parse_saved
    monkeypatch.setattr(
        configs, "parse_saved", lambda text, **words: parsed.append(text) or parse(text, **words)
    )
    layout = RunLayout.open(two[1])
    config = layout.root / "config.yaml"
    before = config.read_text()
    try:
        config.write_text("a: 2\nb: [1")
        with pytest.raises(StoreError, match="nobody waits"):
            settings_of(layout, has_left=lambda: True)
        for _ in range(2):
            with pytest.raises(ConfigError, match="not readable as YAML"):
                settings_of(layout)
        assert len(parsed) == 1
        config.write_text(f"a: {'x' * 70_000}\n")
        with pytest.raises(ConfigError, match=r"70,004 characters, more than 65,536"):
            settings_of(layout)
        assert len(parsed) == 1
    finally:
        config.write_text(before)


def test_as_many_kinds_of_tasks_as_rows_are_shown_in_linear_time() -> None:
    """The attack: 190,000 kinds took a thread for most of an hour."""
    n_rows = 50_000
    table = pa.table(
        {
            "split": ["train"] * n_rows,
            "kind": [f"a{number}" for number in range(n_rows)],
            "task_id": [f"a{number}" for number in range(n_rows)],
            "won": [1] * n_rows,
            "played": [1] * (n_rows - 1) + [5],
            SIDE: [0] * n_rows,
        }
    )
    looked: list[str] = []

    class Row(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            looked.append(name)
            return super().__getitem__(name)

    rows = mock.Mock(to_pylist=lambda: list(map(Row, table.to_pylist())))
    shown = show_kinds(mock.Mock(names=("a", "b")), rows)
    assert shown.count("<tr>") == 1 + SHOWN_KINDS + 1, "the head, the most played, and all"
    assert f"a{n_rows - 1}" in shown
    assert len(looked) < 20 * n_rows


def test_settings_differ_by_value_and_not_by_writing() -> None:
    first = {"run_dir": "x", "a": 1, "b": "", "c": [1], "d": 2, "e": True}
    second = {"run_dir": "y", "a": 1.0, "b": None, "c": [2], "e": False}
    assert differing(first, second) == [
        ("c", "[1]", "[2]"),
        ("d", "2", "–"),
        ("e", "True", "False"),
    ]
