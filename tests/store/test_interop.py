"""Other people's tools on a run's files and on an exported dataset: every column arrives as it was
written.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pandas
import polars
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import ray
import torch

from gigpo import PUBLISHED_SETTINGS, advantages_macro
from store import (
    SEGMENT_SCHEMA,
    Catalog,
    RunLayout,
    Trajectory,
    export,
    to_table,
    write_open_sql,
    write_segment,
)
from store.exchange.dataset_export import export_selection, live_files
from tests.support.run_views import connect
from tests.support.store_samples import make_step, make_trajectory, open_train_group

DUCKDB_SHELL = shutil.which("duckdb", path=str(Path(sys.executable).parent)) or shutil.which(
    "duckdb"
)
KEY = [("traj_uid", "ascending"), ("step_index", "ascending")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    root: Path
    files: list[str]
    exported: Path  # the directory of its Parquet files
    table: pa.Table  # what was written, in the order of KEY


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """Two groups in two files, with what columns can hold: nulls, empty lists, other alphabets,
    large and negative numbers.
    """
    directory = tmp_path_factory.mktemp("interop")
    layout = RunLayout.create(directory / "run", config_yaml="a: 1\n")
    written: list[Trajectory] = []
    with Catalog.open(layout) as catalog:
        write_open_sql(layout, macros=[advantages_macro(PUBLISHED_SETTINGS)], max_staleness=4)
        for version in (0, 3):
            group = open_train_group(catalog, None)
            played = [make_trajectory(group, member, version=version) for member in group.missing]
            odd = make_step(
                2,
                n_steps=3,
                version=version,
                prompt_ids=(2**31 - 1, 0, 5),
                response_ids=(),
                response_logprobs=(),
                obs_text="Tür 'zu',\n\"東\" \N{GRINNING FACE}",
                admissible_actions=(),
                action_text="",
                reward=-1e-300,
                truncated=True,
            )
            played[1] = replace(played[1], steps=(*played[1].steps[:2], odd), seed=-(2**40))
            catalog.commit(
                write_segment(layout, played, worker="w0", epoch=catalog.epoch), epoch=catalog.epoch
            )
            written += played
        export(catalog, layout)
    export_selection(layout.root, directory / "out", where=None, as_of=None)
    table = to_table(written)
    assert all(table[name].null_count for name in ("task_score", "anchor_text", "state_hash"))
    return Sample(
        root=layout.root,
        files=[str(path) for path in live_files(layout.root)],
        exported=directory / "out/data",
        table=table.sort_by(KEY),
    )


def assert_same(found: pa.Table, sample: Sample) -> None:
    """The same rows, whatever their order and whatever wider types the tool made of the columns."""
    assert set(found.column_names) == set(SEGMENT_SCHEMA.names)
    found = found.select(SEGMENT_SCHEMA.names).cast(SEGMENT_SCHEMA).sort_by(KEY).combine_chunks()
    for name in SEGMENT_SCHEMA.names:
        assert found[name].to_pylist() == sample.table[name].to_pylist(), name


@pytest.mark.skipif(DUCKDB_SHELL is None, reason="no duckdb binary: pip install duckdb-cli")
def test_a_bare_duckdb_shell_opens_a_run(sample: Sample) -> None:
    assert DUCKDB_SHELL is not None
    query = """SELECT s.traj_uid, s.step_index, s.response_ids, s.obs_text, s.state_hash,
                      s.t_start, g.state, a.advantage
               FROM steps AS s JOIN groups AS g USING (group_uid)
               JOIN advantages() AS a USING (traj_uid, step_index)
               ORDER BY ALL"""
    command = [DUCKDB_SHELL, "-init", "open.sql", "-json", "-c", query]
    done = subprocess.run(
        command, cwd=sample.root, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout[done.stdout.index("[{") :])  # after the shell's remarks
    # the same in this process, by another release of DuckDB
    with connect(RunLayout.open(sample.root)) as connection:
        expected = connection.sql(query).fetchall()
    assert len(expected) == len(sample.table)
    for row, (
        traj_uid,
        step_index,
        response_ids,
        obs_text,
        state_hash,
        t_start,
        state,
        advantage,
    ) in zip(rows, expected, strict=True):
        assert (row["traj_uid"], row["step_index"], row["obs_text"]) == (
            str(traj_uid),
            step_index,
            obs_text,
        )
        assert json.loads(str(row["response_ids"])) == response_ids
        assert row["state_hash"] == (None if state_hash is None else str(state_hash))
        assert (row["t_start"], row["state"]) == (str(t_start), state)
        assert row["advantage"] == pytest.approx(advantage, abs=1e-9)


def test_pandas(sample: Sample) -> None:
    for frame in (pandas.read_parquet(sample.files), pandas.read_parquet(sample.exported)):
        assert_same(
            pa.Table.from_pandas(frame, schema=SEGMENT_SCHEMA, preserve_index=False), sample
        )
    with connect(RunLayout.open(sample.root)) as connection:
        frame = connection.sql(
            "SELECT won, sum(reward) AS r FROM steps GROUP BY won ORDER BY won"
        ).df()
    rewards = sample.table.group_by("won").aggregate([("reward", "sum")]).sort_by("won")
    assert frame["won"].tolist() == rewards["won"].to_pylist()
    assert frame["r"].tolist() == pytest.approx(rewards["reward_sum"].to_pylist())


def test_polars(sample: Sample) -> None:
    for source in (sample.files, f"{sample.exported}/*.parquet"):
        lazy = polars.scan_parquet(source)
        assert_same(lazy.collect().to_arrow(), sample)
        longest = lazy.select(polars.col("prompt_ids").list.len().max()).collect().item()
        assert longest == max(map(len, sample.table["prompt_ids"].to_pylist()))


def test_pyarrow_dataset(sample: Sample) -> None:
    for source in (sample.files, str(sample.exported)):
        dataset = pyarrow.dataset.dataset(source)
        assert_same(dataset.to_table(), sample)
        assert dataset.count_rows(filter=pyarrow.dataset.field("truncated")) == 2


def test_hugging_face_datasets_give_token_ids_as_tensors(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from datasets import load_dataset  # reads the environment when it is imported

    dataset = load_dataset(
        "parquet", data_dir=str(sample.exported), split="train", cache_dir=str(tmp_path)
    )
    assert_same(dataset.data.table, sample)
    live = load_dataset("parquet", data_files=sample.files, split="train", cache_dir=str(tmp_path))
    assert_same(live.data.table, sample)
    tensors = dataset.with_format(
        "torch", columns=["prompt_ids", "response_ids", "response_logprobs", "traj_uid"]
    )
    for row, plain in zip(tensors, dataset, strict=True):
        for name, dtype in (
            ("prompt_ids", torch.int64),
            ("response_ids", torch.int64),
            ("response_logprobs", torch.float32),
        ):
            assert isinstance(row[name], torch.Tensor)
            # torch has no integers to make an empty list of
            assert row[name].dtype == dtype or not plain[name]
            assert row[name].tolist() == plain[name]


def test_the_documented_line_gives_hugging_face_rows_as_tensors(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    documented = (
        Path(__file__).resolve().parents[2] / "docs/store.md",
        sample.exported.parent / "README.md",
    )
    for text in (path.read_text() for path in documented):
        (line,) = re.findall(r"datasets\.load_dataset\(.*?\.with_format\(.*?\)", text, re.DOTALL)
        dataset = eval(line.replace("DIR/data", str(sample.exported)), {"datasets": datasets})
        assert len(dataset) == sample.table.num_rows
        assert all(isinstance(row["response_ids"], torch.Tensor) for row in dataset)


@pytest.fixture
def local_ray() -> Iterator[None]:
    started = not ray.is_initialized()
    if started:
        ray.init(
            num_cpus=1,
            include_dashboard=False,
            logging_level="ERROR",
            object_store_memory=100_000_000,
        )
    yield
    if started:
        ray.shutdown()


@pytest.mark.slow
def test_ray_data(sample: Sample, local_ray: None) -> None:
    dataset = ray.data.read_parquet(sample.files)
    assert_same(pa.concat_tables(ray.get(dataset.to_arrow_refs())), sample)


def test_the_files_are_ordinary_parquet(sample: Sample) -> None:
    """16-byte uids as plain binaries: an extension type would shut out Hugging Face datasets."""
    for path in (*sample.files, *sample.exported.glob("*.parquet")):
        assert pq.read_schema(path).remove_metadata() == SEGMENT_SCHEMA
