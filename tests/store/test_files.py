"""Records, hashes, the layout and segments: what is on disk is whole, checked and exactly what was
given.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store import (
    SEGMENT_SCHEMA,
    Catalog,
    DigestError,
    FormatError,
    Group,
    RunLayout,
    StepImage,
    StoreError,
    Trajectory,
    hashing,
    in_segments,
    keep_private,
    read_segment,
    read_segments,
    segment_encoding,
    state_hash,
    to_table,
    uid,
    valid_text,
    write_segment,
)
from store.hashing import canonical
from tests.support.store_samples import from_table, make_step, make_trajectory, open_train_group


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return RunLayout.create(tmp_path / "run", config_yaml="a: 1\n")


@pytest.fixture
def trajectories(layout: RunLayout) -> list:
    with Catalog.open(layout) as catalog:
        group = open_train_group(catalog, 0)
    return [make_trajectory(group, 0, version=3), make_trajectory(group, 1, version=2, n_steps=2)]


def test_a_table_gives_back_what_it_was_made_of(trajectories: list) -> None:
    table = to_table(trajectories)
    assert table.schema == SEGMENT_SCHEMA
    assert table.num_rows == 5
    assert from_table(table) == tuple(trajectories)
    shuffled = table.take([4, 2, 0, 3, 1])
    assert set(from_table(shuffled)) == set(trajectories)


def test_images_are_part_of_what_the_digest_is_of(layout: RunLayout, trajectories: list) -> None:
    with Catalog.open(layout) as catalog:
        first = write_segment(layout, trajectories, worker="w0", epoch=catalog.epoch)
    (image,) = trajectories[1].steps[1].images
    changed = dataclasses.replace(image, pixels=image.pixels[:-1] + b"\xff")
    steps = (
        trajectories[1].steps[0],
        dataclasses.replace(trajectories[1].steps[1], images=(changed,)),
    )
    other = write_segment(
        layout,
        [trajectories[0], dataclasses.replace(trajectories[1], steps=steps)],
        worker="w0",
        epoch=1,
    )
    assert first.digest != other.digest
    assert from_table(read_segment(layout, other))[1].steps[1].images == (changed,)
    images = read_segment(layout, first)["images"].to_pylist()
    assert images == [
        None,
        [{"height": 1, "width": 2, "pixels": bytes([1] * 6)}],
        None,
        None,
        images[1],
    ]


def test_the_figures_of_a_trajectory(trajectories: list) -> None:
    first = trajectories[0]
    assert (first.n_steps, first.episode_return, first.invalid_steps) == (3, 0.0 + 1.0 + 2.0, 1)
    assert (first.version_min, first.version_max) == (3, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_index": 2}, "step_index 2"),
        ({"response_logprobs": (-0.5,)}, "2 response_ids but 1 response_logprobs"),
        ({"response_logprobs": (-0.5, float("nan"))}, "response_logprobs holds a NaN"),
        ({"reward": float("inf")}, "reward holds a NaN or an infinity"),
        ({"reward": -1e150}, r"reward holds 1e\+150 in size, above 1e\+12"),
        ({"reward": 1.1e12}, r"reward holds 1.1e\+12 in size, above 1e\+12"),
        ({"state_hash": None}, "go together"),
        ({"version_min": 9}, "version_min 9"),
        ({"prompt_ids": (2**40,)}, "prompt_ids"),
        ({"images": (StepImage(height=2, width=2, pixels=bytes(11)),)}, "2 x 2 has 11 bytes"),
    ],
)
def test_a_malformed_step_is_refused_with_its_value(
    trajectories: list, changes: dict, message: str
) -> None:
    bad = dataclasses.replace(
        trajectories[0], steps=(make_step(0, n_steps=1, version=0, **changes),)
    )
    with pytest.raises(StoreError, match=message):
        to_table([bad])


@pytest.mark.parametrize(("n_repeats", "compression"), [(1, "LZ4"), (2_000, "ZSTD")])
def test_small_files_are_compressed_with_lz4(
    trajectories: list, n_repeats: int, compression: str
) -> None:
    table = pa.concat_tables([to_table(trajectories[:1])] * n_repeats)
    assert (table.nbytes < segment_encoding.SMALL_BYTES) == (n_repeats == 1)
    file = pq.ParquetFile(pa.BufferReader(segment_encoding.encode(table, metadata={})))
    columns = [file.metadata.row_group(0).column(n) for n in range(file.metadata.num_columns)]
    assert {column.compression for column in columns} == {compression}


def test_a_final_anchor_needs_its_hash(trajectories: list) -> None:
    final = dataclasses.replace(trajectories[0].final_observation, state_hash=None)
    with pytest.raises(StoreError, match="final observation: anchor_text and state_hash go to"):
        to_table([dataclasses.replace(trajectories[0], final_observation=final)])


@pytest.mark.parametrize("marks", ["\u0315\u0300", "\u0f73", "\u0345\U0001e94a"])
def test_many_combining_marks_take_no_quadratic_time(marks: str) -> None:
    """Sorted by insertion they would take hours."""
    text = "a" + "".join(mark * 2_000_000 for mark in marks)
    assert state_hash(text) != state_hash(text + "b")


@given(st.text("e\u0301\u0f73中", max_size=200), st.integers(0, 40))
def test_marks_are_found_wherever_they_stand(before: str, n_marks: int) -> None:
    text = before + "\u0301" * n_marks + "e"
    longest = max(len(found) for found in re.findall("[\u0301\u0f73]*", text))
    assert hashing._has_many_marks(text) == (longest > hashing.MOST_MARKS)


def test_no_marks_are_looked_for_in_a_very_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take seconds with the interpreter's lock, and heartbeats wait."""
    monkeypatch.delattr(hashing, "_has_many_marks")
    text = "中" * hashing.MOST_NORMALISED
    assert state_hash(text + "e\u0301") != state_hash(text + "\u00e9")
    with pytest.raises(NameError):
        state_hash("中")


def test_a_state_hash_sees_unicode_forms_and_line_ends_as_one() -> None:
    assert state_hash("cafe\u0301\r\nx") == state_hash("caf\u00e9\nx")
    assert state_hash("a ") != state_hash("a")
    # for ever: runs on disk depend on it
    many = "\u0315" * 15 + "\u0301" * 15
    assert state_hash("e" + many) == state_hash("\u00e9" + many.replace("\u0301", "", 1))
    assert state_hash("abc").hex() == "bbe64f9a228473e8d3d87ffe4ad38999"


@given(st.lists(st.one_of(st.none(), st.text(), st.binary(), st.integers()), max_size=4), st.data())
def test_different_parts_make_different_uids(parts: list, data: st.DataObject) -> None:
    other = data.draw(
        st.lists(st.one_of(st.none(), st.text(), st.binary(), st.integers()), max_size=4)
    )
    same = [(type(part), part) for part in parts] == [(type(part), part) for part in other]
    assert (uid(*parts) == uid(*other)) == same
    assert len(uid(*parts)) == 16


def test_run_json_is_written_once_and_one_of_another_format_refused(layout: RunLayout) -> None:
    assert RunLayout.open(layout.root) == layout
    with pytest.raises(StoreError, match="already holds a run"):
        RunLayout.create(layout.root, config_yaml="b: 2\n")
    assert RunLayout.open(layout.root).info.config_yaml == "a: 1\n"
    content = json.loads(layout.run_json.read_text())
    layout.run_json.unlink()
    layout.run_json.write_text(json.dumps({**content, "format": "async-gigpo/99"}))
    with pytest.raises(FormatError, match="format 'async-gigpo/99'"):
        RunLayout.open(layout.root)
    layout.run_json.write_text("{")
    with pytest.raises(FormatError, match="run.json"):
        RunLayout.open(layout.root)
    with pytest.raises(FormatError, match="not a run directory"):
        RunLayout.open(layout.root / "elsewhere")


def test_a_segment_reads_back_and_is_immutable(layout: RunLayout, trajectories: list) -> None:
    meta = write_segment(layout, trajectories, worker="w0", epoch=1)
    path = layout.root / meta.path
    assert path.stat().st_mode & 0o777 == 0o444
    assert path.stat().st_size == meta.n_bytes
    assert from_table(read_segment(layout, meta)) == tuple(trajectories)
    # a retry names the same file
    assert write_segment(layout, trajectories, worker="w0", epoch=1) == meta
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    row_group = pq.ParquetFile(path).metadata.row_group(0)
    logprobs, token_ids = (
        row_group.column(SEGMENT_SCHEMA.names.index(name)).encodings
        for name in ("response_logprobs", "prompt_ids")
    )
    assert "BYTE_STREAM_SPLIT" in logprobs
    # neither a dictionary, which is slow, nor what DuckDB 1.5 cannot read
    assert set(token_ids) == {"PLAIN", "RLE"}


def test_what_the_umask_keeps_from_others_is_kept_from_them(tmp_path: Path) -> None:
    """The attack: files of a run could be read by everyone under a umask of 077."""
    made_in_a_child = (
        "import os, pathlib, store; os.umask(0o077); "
        f"store.RunLayout.create(pathlib.Path({str(tmp_path / 'run')!r}), config_yaml='a: 1')"
    )
    subprocess.run([sys.executable, "-c", made_in_a_child], check=True)
    made = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    assert len(made) > 5
    assert [path for path in made if path.stat().st_mode & 0o077] == []


def test_signatures_and_the_lock_are_for_their_owner_only(layout: RunLayout) -> None:
    """The attack: who may open the lock's file, also only to read it, can keep its owner out."""
    layout.catalog_lock.touch(0o644)
    Catalog.open(layout).close()
    for name in ("signed.json", "catalog.lock"):
        assert (layout.root / name).stat().st_mode & 0o777 == 0o600
    assert layout.run_json.stat().st_mode & 0o777 == 0o444


def test_signatures_in_a_storage_are_for_their_owner_only(tmp_path: Path) -> None:
    """The attack: a neighbour copied the signed files of a shared directory, and built another run
    around them. It counted as the user's own, so links in it were followed.
    """
    storage = tmp_path / "shared"
    layout = RunLayout.create(tmp_path / "run", config_yaml="a: 1\n", storage_uri=storage.as_uri())
    signed, run_json = storage / "signed.json", storage / "run.json"
    assert signed.read_bytes() == (layout.root / "signed.json").read_bytes()
    assert signed.stat().st_mode & 0o777 == 0o600
    assert run_json.stat().st_mode & 0o777 == 0o444


def test_a_directory_is_kept_private_also_one_that_was_there(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir(mode=0o755)
    for name in ("there", "new"):
        keep_private(tmp_path / name)
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be kept from other users: Not a directory"):
        keep_private(tmp_path / "file" / "run")


def test_only_trajectories_that_count_are_read(layout: RunLayout, trajectories: list) -> None:
    meta = write_segment(layout, trajectories, worker="w0", epoch=1)
    second_only = dataclasses.replace(meta, trajectories=meta.trajectories[1:])
    assert from_table(read_segment(layout, second_only)) == (trajectories[1],)
    assert read_segment(layout, second_only)["reward"].to_pylist() == [0.0, 1.0]


def test_only_trajectories_that_count_are_read_also_if_their_figures_are_wrong(
    layout: RunLayout, trajectories: list
) -> None:
    """The attack: a rebuild kept the steps of a lost attempt, and a batch had other groups' rows."""
    meta = write_segment(layout, trajectories, worker="w0", epoch=1)
    first = replace(meta.trajectories[0], n_steps=meta.n_steps + 1)
    rows = read_segment(layout, replace(meta, trajectories=(first,)))
    assert set(rows["traj_uid"].to_pylist()) == {first.traj_uid}


def test_every_flipped_bit_is_caught(layout: RunLayout, trajectories: list) -> None:
    meta = write_segment(layout, trajectories, worker="w0", epoch=1)
    path = layout.root / meta.path
    whole = path.read_bytes()
    path.chmod(0o644)
    for position in range(0, len(whole), max(1, len(whole) // 100)):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << (position % 8)
        path.write_bytes(flipped)
        with pytest.raises(DigestError, match=path.name):
            read_segment(layout, meta)
    path.write_bytes(whole[:-1])
    with pytest.raises(DigestError, match=path.name):
        read_segment(layout, meta)
    path.unlink()
    with pytest.raises(StoreError, match=path.name):
        read_segment(layout, meta)


def test_a_segment_needs_distinct_trajectories_and_a_plain_worker_name(
    layout: RunLayout, trajectories: list
) -> None:
    with pytest.raises(StoreError, match="at least one"):
        write_segment(layout, [], worker="w0", epoch=1)
    with pytest.raises(StoreError, match="same traj_uid"):
        write_segment(layout, trajectories[:1] * 2, worker="w0", epoch=1)
    with pytest.raises(StoreError, match="'../w'"):
        write_segment(layout, trajectories, worker="../w", epoch=1)


def test_text_that_holds_half_a_character_is_stored_whole(
    layout: RunLayout, trajectories: list
) -> None:
    """Such text came from JSON that another program wrote, and no file can hold it."""
    half = "a\ud83d\0b"
    texts = {
        "finish_reason": half,
        "obs_text": half,
        "anchor_text": half,
        "action_text": half,
        "state_hash": state_hash(half),
    }
    step = dataclasses.replace(trajectories[0].steps[0], admissible_actions=("go", half), **texts)
    changed = {"env_name": half, "task_id": half, "split": half}
    trajectory = dataclasses.replace(
        trajectories[0], steps=(step, *trajectories[0].steps[1:]), **changed
    )
    meta = write_segment(layout, [trajectory], worker="w0", epoch=1)
    (found,) = from_table(read_segment(layout, meta))
    assert {found.env_name, found.task_id, found.split} == {"a\ufffd\0b"}
    first = found.steps[0]
    assert {first.finish_reason, first.obs_text, first.anchor_text, first.action_text} == {
        "a\ufffd\0b"
    }
    assert first.admissible_actions == ("go", "a\ufffd\0b")
    assert first.state_hash == state_hash("a\ufffd\0b")
    assert found.steps[1:] == trajectories[0].steps[1:]


def test_an_error_that_quotes_half_a_character_is_logged(layout: RunLayout) -> None:
    with Catalog.open(layout) as catalog:
        group = catalog.lease_open_group(worker="w0", lease_s=60.0, split=None) or open_train_group(
            catalog, 0
        )
        leased = catalog.lease_open_group(worker="w0", lease_s=60.0, split=None)
        assert leased is not None and leased.group_uid == group.group_uid
        catalog.log(component="w0", what="episode failed", detail="it said \ud83d")
        catalog.give_up(group.group_uid, worker="w0", state="abandoned", reason="it said \ud83d")


@given(st.text(st.characters(codec=None), max_size=20))
def test_whole_text_changes_nothing_but_halves_of_characters(text: str) -> None:
    whole = valid_text(text)
    whole.encode()
    assert valid_text(whole) == whole
    if not any("\ud800" <= char <= "\udfff" for char in text):
        assert whole == text


def test_two_halves_of_one_character_become_it() -> None:
    assert valid_text("\ud83d\ude00!\ude00\ud83d") == "\U0001f600!\ufffd\ufffd"


def test_a_state_hash_does_not_depend_on_the_version_of_python() -> None:
    """The attack: Python 3.12 sorts a mark that 3.11 does not know, and fsck set the file aside."""
    for mark in "\U0001e08f\U00010efd\U00011f41\U0001e4ef":
        assert canonical(f"a{mark}\u0323\u0301") == f"a{mark}\u0323\u0301"
    assert canonical("a\u0301\u0323") == "\u1ea1\u0301", "older ones are sorted"


@pytest.mark.parametrize("of", ["images", "admissible_actions"])
def test_large_trajectories_are_divided_into_segments_that_can_be_read(
    of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: eight episodes of screenshots were one file of 2 GiB, which nothing could read.

    So were those of 34 lists of actions with 64 million characters.
    """
    group = Group.imported(group_uid=b"g" * 16, task_id="t", size=5)
    one = {
        "images": StepImage(height=1, width=3, pixels=bytes(9)),
        "admissible_actions": "go \u2190",  # 6 bytes, counted as at most 16
    }[of]

    def trajectory(member: int, n: int) -> Trajectory:
        made = make_trajectory(group, member, n_steps=1)
        return replace(made, steps=(replace(made.steps[0], **{of: (one,) * n}),))

    played = [trajectory(member, n) for member, n in enumerate((1, 1, 0, 100, 1))]
    max_bytes = sum(one.max_bytes for one in played[:3])
    monkeypatch.setattr("store.segments.MAX_SEGMENT_BYTES", max_bytes)
    parts = [[one.member for one in part] for part in in_segments(played)]
    assert parts == [[0, 1, 2], [3], [4]]
    assert list(in_segments([])) == []


def test_long_rows_beside_many_short_ones_are_row_groups_of_their_own(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: the long rows of a dataset were one row group, which nothing could read."""
    monkeypatch.setattr("store.segment_encoding.ROW_GROUP_BYTES", 4_000)
    group = Group.imported(group_uid=b"g" * 16, task_id="t", size=1)
    made = make_trajectory(group, 0, n_steps=60)
    steps = tuple(
        replace(step, action_text="x" * (10_000 if 20 <= at < 24 else 1))
        for at, step in enumerate(made.steps)
    )
    played = replace(made, steps=steps)
    meta = write_segment(layout, [played], worker="w0", epoch=1)
    file = pq.ParquetFile(layout.root / meta.path)
    groups = [file.read_row_group(number) for number in range(file.num_row_groups)]
    long = [rows for rows in groups if "x" * 10_000 in rows["action_text"].to_pylist()]
    assert len(long) == 4 and all(len(rows) == 1 for rows in long)
    for is_own in (True, False):
        assert read_segment(layout, meta, is_own=is_own).equals(to_table([played]))


def test_the_bytes_of_a_step_are_never_more_than_its_bound(trajectories: list) -> None:
    """Arrow's own count of its texts, tokens and pixels, without offsets."""
    for step in trajectories[0].steps:
        texts = [step.obs_text, step.anchor_text or "", step.action_text]
        texts += step.admissible_actions or ()
        n_bytes = sum(len(text.encode()) for text in texts)
        n_bytes += 4 * (len(step.prompt_ids) + 2 * len(step.response_ids))
        n_bytes += sum(len(image.pixels) for image in step.images)
        assert step.max_bytes == n_bytes, "all are ASCII"
    wide = replace(trajectories[0].steps[0], obs_text="\U0001f600" * 3)
    assert wide.max_bytes - replace(wide, obs_text="").max_bytes == len(wide.obs_text.encode())
    made = trajectories[0]
    final = made.final_observation
    assert final is not None
    assert made.max_bytes == sum(step.max_bytes for step in made.steps) + len(
        final.text + final.anchor_text + "".join(final.admissible_actions)
    )


def test_rows_of_several_files_may_have_more_than_2_gib_of_texts_and_pixels(
    layout: RunLayout, trajectories: list
) -> None:
    """The attack: no batch with so many could be joined, and each start claimed it again."""
    metas = [write_segment(layout, [one], worker="w0", epoch=1) for one in trajectories]
    rows = read_segments(layout, metas)
    assert rows.cast(SEGMENT_SCHEMA).equals(to_table(trajectories))
    narrow = {pa.string(), pa.binary()}

    def kinds(kind: pa.DataType) -> Iterator[pa.DataType]:
        yield kind
        for at in range(kind.num_fields):
            yield from kinds(kind.field(at).type)

    assert not narrow.intersection(kind for field in rows.schema for kind in kinds(field.type))
