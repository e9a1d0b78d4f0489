"""A run whose files are in a storage, and whose owner was killed."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from store import (
    Catalog,
    CheckpointRecord,
    RunLayout,
    UnavailableError,
    VersionRecord,
    export,
    open_run,
    publish_directory,
    sign_run,
    write_open_sql,
    write_segment,
)
from store.maintenance.maintainer import MaintainerSettings
from store.run_names import BASE_POLICY, SIGNED
from store.storage import LocalStorage
from tests.support.store_runs import MERGE_TWO
from tests.support.store_samples import make_trajectory, open_train_group, play

DIED = 9  # exit code
MAINTAINER = MaintainerSettings(
    snapshot_window_s=900.0, keep_days=None, keep_versions=None, pause_s=60.0, policy=MERGE_TWO
)


def make_directory(layout: RunLayout, path: str, content: bytes) -> Path:
    directory = layout.root / path
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(content)
    return directory


def lose_the_owner(catalog: Catalog) -> None:
    """Close the database without the last backup, like kill -9."""
    catalog._database.close()


def train(catalog: Catalog, layout: RunLayout, *, step: int) -> None:
    """One learner step on one group, with its version and its checkpoint."""
    batch = catalog.claim(n_groups=1, current_version=step - 1, max_staleness=9)
    assert batch is not None
    path = f"weights/v{step:06d}"
    publish_directory(layout, make_directory(layout, path, b"weights"))
    catalog.record_version(VersionRecord(version=step, path=path, digest="d", learner_step=step))
    catalog.settle(batch.batch_id, learner_step=step, filtered={}, version_in=step - 1)
    path = f"checkpoints/step{step:06d}"
    publish_directory(layout, make_directory(layout, path, b"checkpoint %d" % step))
    assert catalog.record_checkpoint(CheckpointRecord(learner_step=step, path=path, version=step))


def make_lost_run(tmp_path: Path) -> RunLayout:
    """Make a run in tmp_path/run with a storage in tmp_path/shared. Groups 0 and 1 were trained on, with checkpoints; 2 was
    trained on and 3 was played after the last backup, and half of 4; weights 4 are half uploaded.
    """
    layout = RunLayout.create(
        tmp_path / "run", config_yaml="a: 1\n", storage_uri=(tmp_path / "shared").as_uri()
    )
    (layout.root / "config.yaml").write_text("a: 1\n")
    sign_run(layout.root)
    for name in ("config.yaml", "signed.json"):
        layout.storage.write(name, (layout.root / name).read_bytes(), is_private=name == SIGNED)
    publish_directory(layout, make_directory(layout, BASE_POLICY, b"base"))
    write_open_sql(layout, macros=(), max_staleness=9)
    catalog = Catalog.open(layout)
    catalog.record_version(
        VersionRecord(version=0, path="weights/v000000", digest="d", learner_step=None)
    )
    for ordinal in range(3):
        play(layout, catalog, open_train_group(catalog, ordinal))
    for step in (1, 2):
        train(catalog, layout, step=step)
    batch = catalog.claim(n_groups=1, current_version=2, max_staleness=9)
    assert batch is not None
    catalog.settle(batch.batch_id, learner_step=3, filtered={}, version_in=2)
    catalog.record_version(
        VersionRecord(version=3, path="weights/v000003", digest="d", learner_step=3)
    )
    publish_directory(layout, make_directory(layout, "weights/v000003", b"weights"))
    make_directory(layout, "weights/v000004", b"weights")
    layout.storage.write("weights/v000004/model.safetensors", b"wei")
    play(layout, catalog, open_train_group(catalog, 3))
    group = open_train_group(catalog, 4)
    part = write_segment(
        layout, [make_trajectory(group, 1, version=3)], worker="w0", epoch=catalog.epoch
    )
    catalog.commit(part, epoch=catalog.epoch)
    export(catalog, layout)
    lose_the_owner(catalog)
    return layout


def states(root: Path) -> dict[int, tuple[str, int]]:
    with open_run(root) as reader:
        rows = reader.rows("SELECT ordinal, state, n_members FROM groups ORDER BY ordinal")
    return {row["ordinal"]: (row["state"], row["n_members"]) for row in rows}


def states_of_catalog(layout: RunLayout) -> dict[int, str]:
    with Catalog.open(layout) as catalog, catalog._database.transaction() as tx:
        return {row["ordinal"]: row["state"] for row in tx.rows("SELECT ordinal, state FROM grp")}


def catalog_paths(layout: RunLayout) -> list[str]:
    with Catalog.open(layout) as catalog, closing(catalog._database.copy()) as copy:
        return [row[0] for row in copy.execute("SELECT path FROM segment")]


def uri_of(layout: RunLayout) -> str:
    assert layout.info.storage_uri is not None
    return layout.info.storage_uri


def play_groups(layout: RunLayout, *ordinals: int) -> None:
    with Catalog.open(layout) as catalog:
        for ordinal in ordinals:
            play(layout, catalog, open_train_group(catalog, ordinal))
        export(catalog, layout)


def die(*_: object, **__: object) -> None:
    """End this process at once, like kill -9. Put it in the place of a function."""
    os._exit(DIED)


def call_until_it_dies(act: Callable[..., object], *given: object, **named: object) -> None:
    """Call a function in a process of its own, which has to `die` in it."""
    child = multiprocessing.get_context("fork").Process(target=act, args=given, kwargs=named)
    child.start()
    child.join()
    assert child.exitcode == DIED


def hold_write(
    patch: pytest.MonkeyPatch,
    path: str,
    *,
    nth: int = 1,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[bytes]:
    """Let the storage hold the nth write of `path` and not answer. Return a list of its data.

    The list is empty until then. `meanwhile` is called before the writer gives up waiting. Write
    the data later to let the request arrive.
    """
    write, n_written, held = LocalStorage.write, 0, []

    def write_or_hold(storage: LocalStorage, to: str, data: bytes, **more: bool) -> None:
        nonlocal n_written
        n_written += to == path
        if to != path or n_written != nth:
            write(storage, to, data, **more)
            return
        held.append(data)
        meanwhile()
        raise UnavailableError("no answer")

    patch.setattr(LocalStorage, "write", write_or_hold)
    return held
