"""Check which steps are compared: anchor keys, similar texts and policy versions, by hand."""

from __future__ import annotations

import itertools
import random
import re
import string
from difflib import SequenceMatcher
from fractions import Fraction

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigpo import (
    PUBLISHED_SETTINGS,
    advantages_macro,
    compute_advantages,
    similarity,
    similarity_keys,
)
from gigpo.similarity import MAX_CHARACTERS
from tests.support.gigpo_samples import column, episode, settings, table, uid


def one_step_each(*values: float, states: str = "") -> pa.Table:
    """Return a trajectory of one step per value, in one state unless `states` names others."""
    names = states.split() or ["s"] * len(values)
    return table({f"t{i}": [(names[i], value, True)] for i, value in enumerate(values)})


def texts(*values: str | None, group: str = "task") -> pa.Table:
    return pa.table(
        {
            "group_uid": pa.array([uid(group)] * len(values), pa.binary(16)),
            "anchor_text": pa.array(values),
        }
    )


def partition(values: list[object]) -> list[int]:
    """Each value's first position: what is equal to what."""
    return [values.index(value) for value in values]


def test_suffixes_keep_apart_what_was_reached_differently():
    steps = table(
        {"A": episode("s t", end=4), "B": episode("u t", end=0), "C": episode("s t", end=1)}
    )
    sizes = {k: column(steps, "anchor_size", anchor="suffix", anchor_history=k) for k in (1, 2, 3)}
    assert sizes[1] == column(steps, "anchor_size") == [2, 3, 1, 3, 2, 3]
    # At 2 states t after s is not t after u; a first step has a history of one state, like other
    # first steps.
    assert sizes[2] == sizes[3] == [2, 2, 1, 1, 2, 2]
    beginning = table({"A": episode("s", end=4), "B": episode("u s", end=0)})
    assert column(beginning, "anchor_size", anchor="suffix", anchor_history=2) == [1, 1, 1]


def test_a_suffix_with_an_unknown_state_equals_nothing():
    episodes = {
        name: [("s", 0.0, True), (None, 0.0, True), ("t", reward, True)]
        for name, reward in (("A", 1), ("B", 0))
    }
    assert (
        column(table(episodes), "anchor_size", anchor="suffix", anchor_history=2) == [2, 1, 1] * 2
    )
    assert (
        column(table(episodes), "anchor_size", anchor="suffix", anchor_history=1) == [2, 1, 2] * 2
    )


def test_admissible_actions_are_a_set():
    steps = one_step_each(3, 1, 0, 0, 0, 0, 0)
    actions = [
        ["go", "take"],
        ["take", "go"],
        ["go"],
        ["go,take"],
        [],
        ["go", "take", "go"],
        ["go", "go"],
    ]
    steps = steps.append_column("admissible_actions", pa.array(actions))
    assert column(steps, "anchor_size", anchor="state_and_actions") == [3, 3, 2, 1, 1, 3, 2]
    run_together = one_step_each(3, 1).append_column(
        "admissible_actions", pa.array([["ab", "c"], ["a", "bc"]])
    )
    assert column(run_together, "anchor_size", anchor="state_and_actions") == [1, 1]
    with pytest.raises(ValueError, match=r"lacks the columns \['admissible_actions'\]"):
        column(one_step_each(1, 2), "advantage", anchor="state_and_actions")
    for unknown in ([None, None], [["go"], None], [["go"], ["go", None]]):
        nothing = one_step_each(1, 2).append_column(
            "admissible_actions", pa.array(unknown, pa.list_(pa.string()))
        )
        with pytest.raises(
            ValueError, match="needs a list admissible_actions without NULL for every step"
        ):
            column(nothing, "advantage", anchor="state_and_actions")


def test_a_given_key_may_be_of_any_type_and_null_is_alone():
    for keys in (
        pa.array([7, 7, None, None]),
        pa.array(["", "", None, None]),
        pa.array([uid("x")] * 2 + [None] * 2),
    ):
        steps = one_step_each(3, 1, 5, 9, states="a b c c").append_column("anchor_key", keys)
        assert column(steps, "step_advantage", anchor="anchor_key") == [1.0, -1.0, 0.0, 0.0]
    for nothing in (pa.nulls(2), pa.array([float("nan")] * 2)):
        with pytest.raises(
            ValueError, match="needs a column anchor_key; this table has none, or only NULL"
        ):
            column(
                one_step_each(3, 1).append_column("anchor_key", nothing),
                "advantage",
                anchor="anchor_key",
            )


@pytest.mark.parametrize("name", ["state_hash", "anchor_key"])
def test_nan_is_no_state_in_python_and_in_a_shell(name):
    steps = one_step_each(3, 1, 5, 9)
    keys = pa.array([float("nan"), float("nan"), 2.0, 2.0])
    steps = steps.drop_columns(["state_hash"]).append_column(name, keys)
    if name == "anchor_key":
        steps = steps.append_column("state_hash", pa.array(["s"] * 4))
    anchor = "state" if name == "state_hash" else name
    assert column(steps, "anchor_size", anchor=anchor) == [1, 1, 2, 2]
    with duckdb.connect() as shell:
        shell.register("steps", steps)
        shell.execute(advantages_macro(settings(anchor=anchor)))
        assert shell.execute("SELECT anchor_size FROM advantages() ORDER BY 1").fetchall() == [
            (1,),
            (1,),
            (2,),
            (2,),
        ]


def test_a_key_can_be_recomputed_in_sql_from_the_stored_text():
    steps = one_step_each(3, 1, 5, states="Nothing nothing Other")
    with duckdb.connect() as shell:
        shell.register("steps", steps)
        shell.execute(
            advantages_macro(settings(anchor="anchor_key"), anchor_expression="lower(anchor_text)")
        )
        lowered = shell.execute(
            "SELECT step_advantage FROM advantages() ORDER BY step_return"
        ).fetchall()
        as_stored = shell.execute(
            "SELECT step_advantage FROM advantages(anchor := 'state')"
        ).fetchall()
        shell.register("steps", steps.append_column("Anchor_Key", pa.array(["x", "y", "z"])))
        assert (
            shell.execute("SELECT step_advantage FROM advantages() ORDER BY step_return").fetchall()
            == lowered
        )
        assert lowered == [(-1.0,), (1.0,), (0.0,)]
        assert as_stored == [(0.0,)] * 3
        shell.register("steps", steps)
        shell.execute(advantages_macro(PUBLISHED_SETTINGS))
        with pytest.raises(duckdb.InvalidInputException, match="needs a column anchor_key"):
            shell.execute("FROM advantages(anchor := 'anchor_key')").fetchall()


@pytest.mark.parametrize("anchor", ["similar", "similar_greedy"])
def test_the_macro_of_a_run_that_compares_texts_says_what_to_do(anchor):
    """Its default is the run's own anchor, which a shell cannot compute."""
    with duckdb.connect() as shell:
        shell.register("steps", one_step_each(3, 1, 5, states="a a b"))
        shell.execute(advantages_macro(settings(anchor=anchor)))
        with pytest.raises(
            duckdb.InvalidInputException,
            match=f"anchor {anchor} compares texts.*`gigpo audit RUN`.*similarity_keys",
        ) as caught:
            shell.execute("FROM advantages()").fetchall()
        by_key, by_state = re.findall(r"advantages\(.*?\)", str(caught.value))
        assert shell.execute(f"SELECT anchor_size FROM {by_state} ORDER BY 1").fetchall() == [
            (1,),
            (2,),
            (2,),
        ]
        keyed = one_step_each(3, 1, 5, states=f"{A} {B} other")
        keys = similarity_keys(keyed, threshold=0.9, method="linked")
        shell.register("steps", keyed.append_column("anchor_key", keys))
        assert shell.execute(f"SELECT anchor_size FROM {by_key} ORDER BY 1").fetchall() == [
            (1,),
            (2,),
            (2,),
        ]


def test_keys_that_are_texts_in_a_shell_cannot_run_together():
    states = [["a", "aa", "x"], ["aa", "a", "x"], ["a", "aa", "x"]]
    rows = [
        {
            "group_uid": 1,
            "traj_uid": t,
            "step_index": i,
            "reward": 0.0,
            "is_action_valid": True,
            "state_hash": s,
            "anchor_key": "",
        }
        for t, names in enumerate(states)
        for i, s in enumerate(names)
    ]
    with duckdb.connect() as shell:
        shell.register("steps", pa.Table.from_pylist(rows))
        shell.execute(advantages_macro(PUBLISHED_SETTINGS))
        sizes = "SELECT anchor_size FROM advantages({}) WHERE step_index = 2 ORDER BY traj_uid"
        assert shell.execute(
            sizes.format("anchor := 'suffix', anchor_history := 3")
        ).fetchall() == [(2,), (1,), (2,)]
        # '' is a key, NULL is none
        assert shell.execute(sizes.format("anchor := 'anchor_key'")).fetchall() == [(9,)] * 3


# A-B and B-C .95, A-C .90
A, B, C = "abcdefghijklmnopqrst", "abcdefghijklmnopqrsX", "abcdefghijklmnopqrYX"


@pytest.mark.parametrize(
    ("order", "greedy"), [((A, B, C), [0, 0, 2]), ((B, A, C), [0, 0, 0]), ((C, A, B), [0, 1, 0])]
)
def test_example_8_greedy_depends_on_the_order_and_linked_does_not(order, greedy):
    keys = similarity_keys(texts(*order), threshold=0.95, method="greedy").to_pylist()
    assert partition(keys) == greedy
    # the smallest
    assert similarity_keys(texts(*order), threshold=0.95, method="linked").to_pylist() == [C] * 3


def test_example_8_upstreams_ratio_is_not_symmetric_and_junks_long_texts():
    def together(a: str, b: str, **how: object) -> bool:
        return len(set(similarity_keys(texts(b, a), **how).to_pylist())) == 1  # type: ignore[arg-type]

    # ratio(tide, diet) = .25, ratio(diet, tide) = .5; their longest common subsequence is 2 of 4
    # either way.
    assert not together("tide", "diet", threshold=0.4, method="greedy")
    assert together("diet", "tide", threshold=0.4, method="greedy")
    assert together("tide", "diet", threshold=0.4, method="linked") and together(
        "diet", "tide", threshold=0.4, method="linked"
    )
    rng = random.Random(0)
    short, long = ("".join(rng.choice("abcde") for _ in range(n)) for n in (199, 200))
    assert together("Z" + short, short, threshold=0.95, method="greedy")
    assert not together("Z" + long, long, threshold=0.95, method="greedy")
    assert together("Z" + long, long, threshold=0.95, method="linked")
    assert together(long, long, threshold=0.95, method="greedy")


def test_the_threshold_itself_is_alike():
    for n in range(2, 60):  # n - 1 of n characters in common: 2 (n - 1) / 2n, to the last bit
        a, b = "a" * (n - 1) + "b", "a" * (n - 1) + "c"
        for method in ("linked", "greedy"):
            keys = similarity_keys(texts(a, b), threshold=2 * (n - 1) / (2 * n), method=method)
            assert len(set(keys.to_pylist())) == 1, (n, method)


@pytest.mark.parametrize("method", ["linked", "greedy"])
def test_a_text_beyond_measure_is_similar_to_itself_only(method):
    """The attack: texts of millions of characters, whose comparison does not end."""
    long = "".join(map(chr, range(1 << 16, (1 << 16) + MAX_CHARACTERS)))
    for a, b, n_keys in ((long[1:], long, 1), (long + "a", long, 2), (long + "a", long + "b", 2)):
        keys = similarity_keys(texts(a, b, a), threshold=0.9, method=method).to_pylist()
        assert len(set(keys)) == n_keys and keys[0] == keys[2]


@pytest.mark.parametrize("method", ["linked", "greedy"])
def test_many_long_texts_are_compared_within_a_bound(method, monkeypatch):
    """The attack: 400 texts just below the bound of one text took 40 minutes of CPU."""
    pairs = itertools.permutations("abcdefghijklmnopqrstuvwxyz", 2)
    long = ["".join(pair) * (MAX_CHARACTERS // 2) for pair in itertools.islice(pairs, 400)]
    work = 0

    def counted(queries, choices, **settings):
        nonlocal work
        work += len(queries[0]) * sum(map(len, choices))
        return np.zeros((1, len(choices)))

    monkeypatch.setattr(similarity, "cdist", counted)
    keys = similarity_keys(texts(*long, "go", "go"), threshold=0.9, method=method).to_pylist()
    assert keys == [*long, "go", "go"]
    assert similarity.MAX_WORK // 2 < work <= similarity.MAX_WORK


def texts_of_many_blocks(length: int) -> list[str]:
    """Return texts of 0.9 and more by LCS that differ in every 11th character.

    Their common blocks have one length, so difflib finds them one by one from the left. None of
    their characters is frequent enough for its autojunk.
    """
    rng = random.Random(1)
    alphabet = [chr(0x21 + at) for at in range(110)]
    base: list[str] = []
    while len(base) < length:
        base += rng.sample(alphabet, len(alphabet))
    others = [
        "".join(chr(0x1000 + n) if at % 11 == 10 else c for at, c in enumerate(base[:length]))
        for n in range(4)
    ]
    return ["".join(base[:length]), *others]


def test_difflib_is_asked_within_a_bound(monkeypatch):
    """The attack: two texts of 65,536 characters took hours, as its time is cubic."""
    n_steps = 0
    find = SequenceMatcher.find_longest_match

    def counted(self, alo, ahi, blo, bhi):
        nonlocal n_steps
        n_steps += sum(1 + len(self.b2j.get(one, ())) for one in self.a[alo:ahi])
        return find(self, alo, ahi, blo, bhi)

    monkeypatch.setattr(SequenceMatcher, "find_longest_match", counted)
    attack = texts_of_many_blocks(1500)
    greedy = {"threshold": 0.9, "method": "greedy"}
    assert len(set(similarity_keys(texts(*attack), **greedy).to_pylist())) == 1
    whole = n_steps
    assert whole > 4 * 1500 * 1500 // 11, "each block is searched for in what is left"
    monkeypatch.setattr(similarity, "MAX_RATIO_WORK", whole // 2)
    n_steps = 0
    keys = similarity_keys(texts(*attack, "go", "go"), **greedy).to_pylist()
    assert whole // 4 < n_steps <= whole // 2
    assert 1 < len(set(keys[:-2])) < len(attack) and keys[-2:] == ["go", "go"]


@given(st.lists(st.text("ab c", max_size=12), max_size=6, unique=True), st.floats(0.05, 0.95))
def test_within_the_bound_greedy_keys_are_difflibs(found, threshold):
    leaders: list[str] = []
    expected = []
    for text in found:
        ratios = ((SequenceMatcher(None, text, leader).ratio(), leader) for leader in leaders)
        key = next((leader for ratio, leader in ratios if ratio >= threshold), text)
        expected.append(key)
        if key == text:
            leaders.append(text)
    keys = similarity_keys(texts(*found), threshold=threshold, method="greedy")
    assert keys.to_pylist() == expected


@pytest.mark.parametrize("method", ["linked", "greedy"])
def test_texts_of_wide_characters_count_for_the_time_that_they_take(method, monkeypatch):
    """The attack: texts of 20,000 different characters took 25 times the time, 390 s a group."""
    alphabet = "".join(map(chr, range(0x4E00, 0x4E00 + 20_000)))
    length = 30_000
    n_compared = {}
    for kind, base in (("narrow", "ab" * length), ("wide", alphabet * 2)):
        n_pairs = 0

        def counted(queries, choices, **settings):
            nonlocal n_pairs
            n_pairs += len(choices)
            return np.zeros((1, len(choices)))

        monkeypatch.setattr(similarity, "cdist", counted)
        long = [base[number : number + length] + str(number) for number in range(100)]
        keys = similarity_keys(texts(*long[:2], *long), threshold=0.9, method=method).to_pylist()
        assert len(set(keys)) == len(set(long))
        n_compared[kind] = n_pairs
    assert 20 < n_compared["narrow"] / n_compared["wide"] < 35
    assert n_compared["wide"] * 27 * length**2 < similarity.MAX_WORK


@pytest.mark.parametrize("method", ["linked", "greedy"])
def test_a_pair_of_short_texts_counts_too(method, monkeypatch):
    """The attack: 100,000 texts of one word took 8 minutes, and counted 2% of the bound."""
    monkeypatch.setattr(similarity, "MAX_WORK", 5_000 * similarity.PAIR_WORK)
    words = [f"{number:05}" for number in range(2_000)]
    n_pairs = 0

    def counted(queries, choices, **settings):
        nonlocal n_pairs
        n_pairs += len(choices)
        return np.zeros((1, len(choices)))

    monkeypatch.setattr(similarity, "cdist", counted)
    assert similarity_keys(texts(*words), threshold=0.9, method=method).to_pylist() == words
    assert 4_500 < n_pairs <= 5_000
    assert 16_000**2 / 2 * 2**14 < 1 << 41 < 17_000**2 / 2 * 2**14


def test_difflib_counts_each_pair(monkeypatch):
    """Also where difflib looks at next to nothing, a pair has its cost."""
    monkeypatch.setattr(similarity, "MAX_RATIO_WORK", 100 * similarity.RATIO_PAIR_WORK)
    words = ["".join(order) for order in itertools.permutations("abcdef")][:100]
    n_asked = 0

    def counted(self):
        nonlocal n_asked
        n_asked += 1
        return 0.0

    monkeypatch.setattr(SequenceMatcher, "ratio", counted)
    assert similarity_keys(texts(*words), threshold=0.2, method="greedy").to_pylist() == words
    assert n_asked == 100


def test_a_bound_leaves_out_the_longest_texts_in_any_order(monkeypatch):
    rows = ["abcdefghij", "abcdefghik", "abcdefghijkl", "abcdefghijkm"]
    monkeypatch.setattr(similarity, "PAIR_WORK", 0)
    monkeypatch.setattr(similarity, "MAX_WORK", 10 * 10)
    for order in itertools.permutations(rows):
        keys = similarity_keys(texts(*order), threshold=0.8, method="linked").to_pylist()
        key_of = dict(zip(order, keys, strict=True))
        assert [key_of[row] for row in rows] == [rows[0], rows[0], rows[2], rows[3]]


def test_greedy_asks_difflib_within_a_bound(monkeypatch):
    """Each of ten characters is visited, and its one place; then the rest of one."""
    rows = ["abcdefghij", "abcdefghik", "abcdefghil"]
    steps = similarity.RATIO_PAIR_WORK + 19 + 1
    for enough, expected in ((steps, rows[0]), (steps - 1, rows[1])):
        monkeypatch.setattr(similarity, "MAX_RATIO_WORK", enough)
        keys = similarity_keys(texts(*rows), threshold=0.8, method="greedy").to_pylist()
        assert keys == [rows[0], expected, rows[2]]


def test_linked_is_the_closure_of_alike():
    """Against all pairs of a slow longest common subsequence; any order of rows, with repeats, the
    same keys.
    """

    def common(a: str, b: str) -> int:
        above = [0] * (len(b) + 1)
        for x in a:
            row = [0]
            for j, y in enumerate(b):
                row.append(above[j] + 1 if x == y else max(above[j + 1], row[j]))
            above = row
        return above[-1]

    rng = random.Random(1)
    for _ in range(20):
        values = ["".join(rng.choice("abc") for _ in range(rng.randint(0, 7))) for _ in range(14)]
        key = dict(zip(values, values, strict=True))
        for _ in values:
            for a in values:
                for b in values:
                    if a == b or 2 * common(a, b) / (len(a) + len(b)) >= 0.7:
                        key[a] = key[b] = min(key[a], key[b])
        rows = values + rng.choices(values, k=6)
        rng.shuffle(rows)
        assert similarity_keys(texts(*rows), threshold=0.7, method="linked").to_pylist() == [
            key[text] for text in rows
        ]


def test_texts_of_two_groups_or_none_are_never_compared():
    both = pa.concat_tables(
        [texts("abcd", None, group="g"), texts("abce", None, "abcf", group="h")]
    )
    for method in ("linked", "greedy"):
        keys = similarity_keys(both, threshold=0.7, method=method).to_pylist()
        assert keys == ["abcd", None, "abce", None, "abce"]
    assert similarity_keys(texts(), threshold=0.7, method="linked").to_pylist() == []
    with pytest.raises(ValueError, match=r"threshold=1.0 is outside \(0, 1\)"):
        similarity_keys(both, threshold=1.0, method="linked")
    with pytest.raises(ValueError, match="one of linked, greedy"):
        similarity_keys(both, threshold=0.7, method="nearest")
    nowhere = {"group_uid": ["g", None], "anchor_text": ["a", "b"]}
    with pytest.raises(ValueError, match="row 1 has no group_uid"):
        similarity_keys(nowhere, threshold=0.7, method="linked")


def test_similar_anchors_end_to_end():
    steps = one_step_each(3, 1, 5, states=f"{A} {B} other")
    similar = settings(anchor="similar", similarity=0.9)
    assert compute_advantages(steps, similar)["step_advantage"].to_pylist() == [1.0, -1.0, 0.0]
    # it is the text that is compared, at any threshold
    keyed = steps.append_column("anchor_key", pa.array(["k", "l", "l"]))
    assert compute_advantages(keyed, similar)["step_advantage"].to_pylist() == [1.0, -1.0, 0.0]
    assert column(keyed, "step_advantage", anchor="similar", similarity=0.99) == [0.0, 0.0, 0.0]
    assert column(keyed, "step_advantage", anchor="anchor_key") == [0.0, -2.0, 2.0]
    unknown = steps.set_column(
        steps.column_names.index("anchor_text"), "anchor_text", pa.nulls(3, pa.string())
    )
    with pytest.raises(ValueError, match="similar compares anchor_text, and every step's is NULL"):
        compute_advantages(unknown, similar)
    with pytest.raises(ValueError, match=r"lacks the columns \['anchor_text'\]"):
        compute_advantages(steps.drop_columns(["anchor_text"]), similar)


def test_the_authors_way_to_group_similar_texts_is_an_anchor_too():
    """A and C are like B and not like each other: a chain for 'similar', two clusters for the
    authors' code, if A is first.
    """
    steps = one_step_each(3, 1, 5, states=f"{A} {B} {C}")
    sizes = {
        anchor: column(steps, "anchor_size", anchor=anchor, similarity=0.95)
        for anchor in ("similar", "similar_greedy")
    }
    assert sizes == {"similar": [3, 3, 3], "similar_greedy": [2, 2, 1]}
    assert column(
        steps.take([1, 0, 2]), "anchor_size", anchor="similar_greedy", similarity=0.95
    ) == [3, 3, 3]


def test_many_unrelated_texts_stay_apart():
    rng = random.Random(0)
    values = [
        "".join(rng.choice(string.ascii_lowercase + " ") for _ in range(300)) for _ in range(100)
    ]
    for method in ("linked", "greedy"):
        assert similarity_keys(texts(*values), threshold=0.9, method=method).to_pylist() == values


def test_a_window_of_versions_is_counted_from_the_groups_newest():
    steps = one_step_each(1, 2, 6).append_column("version_min", pa.array([5, 4, 3]))
    by_window = {
        w: column(steps, "step_advantage", anchor_versions="window", version_window=w)
        for w in (0, 1, 2)
    }
    assert by_window == {0: [0.0, 0.0, 0.0], 1: [-0.5, 0.5, 0.0], 2: [-2.0, -1.0, 3.0]}
    assert column(steps, "episode_advantage", anchor_versions="window", version_window=0) == [
        -2.0,
        -1.0,
        3.0,
    ]
    with pytest.raises(ValueError, match=r"lacks the columns \['version_min'\]"):
        column(one_step_each(1, 2), "advantage", anchor_versions="window")
    with pytest.raises(ValueError, match="needs a version_min for every step"):
        column(
            one_step_each(1, 2).append_column("version_min", pa.nulls(2)),
            "advantage",
            anchor_versions="window",
        )


def test_weights_move_the_baseline():
    steps = one_step_each(0, 3).append_column("weight", pa.array([2.0, 1.0]))
    assert column(steps, "step_advantage", anchor_versions="weighted") == pytest.approx([-1, 2])
    # v = 1, 1/2; V = 3/2; var = (1 + 4 / 2) / (3/2 - (5/4) / (3/2)) = 3 / (2/3)
    deviation = 4.5**0.5 + 1e-6
    got = column(steps, "step_advantage", anchor_versions="weighted", normalise="mean_std")
    assert got == pytest.approx([-1 / deviation, 2 / deviation])
    assert column(
        steps, "step_advantage", anchor_versions="weighted", normalise="leave_one_out"
    ) == pytest.approx([-3, 3])
    assert column(steps, "episode_advantage", anchor_versions="weighted") == [-1.5, 1.5]
    for weight in (0.0, -1.0, 1e-101, 1e101, float("nan"), float("inf"), None):
        bad = one_step_each(0, 3).append_column("weight", pa.array([weight, 1.0]))
        with pytest.raises(
            ValueError,
            match="a weight from 1e-100 to 1e100 for every step; trajectory .* step 0 has",
        ):
            column(bad, "advantage", anchor_versions="weighted")


@pytest.mark.parametrize("heavy", [1e15, 1e17, 1e100])
@pytest.mark.parametrize("normalise", ["mean", "mean_std", "leave_one_out"])
def test_one_weight_may_outweigh_all_others(heavy, normalise):
    """Against exact fractions. A comes to s twice, once with the weight that dwarfs all; what the
    others have stays theirs.
    """
    steps = table({"A": episode("s s", end=8), "B": episode("s", end=2), "C": episode("s", end=5)})
    weights = [heavy, 1.0, 0.5, 3.0]
    got = column(
        steps.append_column("weight", pa.array(weights)),
        "step_advantage",
        anchor_versions="weighted",
        normalise=normalise,
        gamma=0.5,
    )
    v, returns, owner = [Fraction(w) for w in weights], [Fraction(r) for r in (4, 8, 2, 5)], "AABC"
    mean = sum(w * r for w, r in zip(v, returns, strict=True)) / sum(v)
    if normalise == "leave_one_out":
        baselines = []
        for own in owner:
            others = [(w, r) for w, r, name in zip(v, returns, owner, strict=True) if name != own]
            baselines.append(sum(w * r for w, r in others) / sum(w for w, _ in others))
        expected = [float(r - b) for r, b in zip(returns, baselines, strict=True)]
    else:
        squares = sum(w * (r - mean) ** 2 for w, r in zip(v, returns, strict=True))
        deviation = float(squares / (sum(v) - sum(w * w for w in v) / sum(v))) ** 0.5 + 1e-6
        expected = [
            float(r - mean) / (deviation if normalise == "mean_std" else 1) for r in returns
        ]
    assert got == pytest.approx(expected, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("normalise", ["mean", "mean_std", "leave_one_out"])
@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_equal_weights_are_no_weights(weight, normalise):
    rng = random.Random(2)
    steps = table(
        {
            f"t{i}": [(rng.choice("abc"), rng.uniform(-1, 1), True) for _ in range(5)]
            for i in range(8)
        }
    )
    steps = steps.append_column("weight", pa.array([weight] * len(steps)))
    mixed = column(steps, "advantage", normalise=normalise)
    assert column(
        steps, "advantage", normalise=normalise, anchor_versions="weighted"
    ) == pytest.approx(mixed, rel=1e-13)
