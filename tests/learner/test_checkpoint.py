from __future__ import annotations

import errno
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from configs import LearnerConfig, LossConfig, ModelConfig, TinyModelConfig
from learner.checkpoint import (
    CheckpointError,
    CheckpointPoint,
    Content,
    kept_checkpoints,
    load_checkpoint,
    prune_checkpoints,
    read_content,
    saved_tensors,
)
from learner.data.micro_batch import MicroBatch
from learner.distributed import deepspeed_setup
from learner.distributed.deepspeed_setup import LOOPBACK, host_ranks, initialize, join_ranks
from learner.distributed.optimizer_state import KINDS, _started, read_state, read_steps, trainable
from learner.files.atomic_directory import atomic_directory
from learner.model.lora import add_adapters
from learner.model.policy_model import load_policy
from learner.model.tiny_model import make_tiny_model, train_tokenizer
from learner.training.engine import Engine
from store import files_digest
from tests.support.engine_samples import copied, cut, make_base, random_rows, save_checkpoint
from tests.support.store_damage import mounted

CHECKPOINT = (
    '{"format_version": 2, '
    '"point": {"learner_step": 1, "version": 1, "n_updates": 1, "lsn": 1}, "dtype": "float32", '
    '"zero_stage": 0, "adam_steps": 1, "parameters": {}, "random_states": [], '
    '"files": [{"kind": "master", "names": [%s], "n_bytes": 1, "digest": ""}]}'
)

DEADLINE_S = 120.0
PAGE_BYTES = 4096  # what a file in memory takes is a multiple of it
POINT = CheckpointPoint(learner_step=2, version=3, n_updates=2, lsn=40)
State = dict[tuple[str, str], torch.Tensor]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(autouse=True)
def _every_parameter_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """At ZeRO 3, though all of these are small enough to be kept whole on each rank."""
    monkeypatch.setattr(deepspeed_setup, "WHOLE_ELEMENTS", 0)


def make_engine(
    base: Path,
    *,
    zero_stage: int,
    dtype: str = "float32",
    ranks: int = 1,
    rank: int = 0,
    address: str | None = None,
) -> Engine:
    return Engine(
        model_path=base,
        model=ModelConfig(dtype=dtype),
        learner=LearnerConfig(
            learning_rate=1e-2, warmup_updates=8, zero_stage=zero_stage, ranks=ranks
        ),
        loss=LossConfig(kl_coef=0.1),
        temperature=1.0,
        seed=0,
        rank=rank,
        address=address,
    )


def drawn_batches(*, ranks: int = 1) -> list[MicroBatch]:
    """Different at each call, by the process's random states: the data goes on only where those are
    restored.
    """
    seeds = (int(torch.randint(1000, ())), int(np.random.randint(1000)), random.randrange(1000))
    return cut(random_rows(6, seed=sum(seeds)), 30, ranks=ranks)


def train(engine: Engine, updates: int) -> list[object]:
    return [engine.update(drawn_batches(ranks=engine.ranks)) for _ in range(updates)]


def save(engine: Engine, dest: Path) -> None:
    save_checkpoint(
        engine, dest, learner_step=POINT.learner_step, version=POINT.version, lsn=POINT.lsn
    )


def state_of(engine: Engine) -> State:
    parameters = trainable(engine.policy.causal_lm)
    return {
        (name, kind): t.clone()
        for kind in KINDS
        for name, t in read_state(engine.deepspeed, parameters, kind=kind)
    }


def assert_equal(one: Mapping[Any, torch.Tensor], other: Mapping[Any, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize(
    ("zero_stage", "dtype"),
    [
        (0, "float32"),
        (1, "float32"),
        (2, "float32"),
        (3, "float32"),
        (1, "bfloat16"),
        (3, "bfloat16"),
    ],
)
def test_a_loaded_run_goes_on_bit_for_bit(
    base: Path, tmp_path: Path, zero_stage: int, dtype: str
) -> None:
    engine = make_engine(base, zero_stage=zero_stage, dtype=dtype)
    train(engine, 2)
    save(engine, tmp_path / "step000002")
    saved = copied(engine)
    straight, end = train(engine, 2), copied(engine)
    engine.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step000002"]

    torch.rand(5), np.random.rand(5), random.random()
    again = make_engine(base, zero_stage=zero_stage, dtype=dtype)
    assert load_checkpoint(again, tmp_path / "step000002") == POINT
    assert_equal(copied(again), saved)
    assert train(again, 2) == straight
    assert_equal(copied(again), end)
    assert not all(torch.equal(tensor, saved[name]) for name, tensor in end.items())
    again.close()


def test_adams_state_is_made_where_fused_adam_wants_it() -> None:
    """On the parameter's device, whichever that is; on the CPU it equals the state after torch's
    own first step.
    """
    parameter = torch.nn.Parameter(torch.ones(3))
    elsewhere = _started({}, parameter.to("meta"))
    assert {name: tensor.device.type for name, tensor in elsewhere.items()} == dict.fromkeys(
        ("step", *KINDS[1:]), "meta"
    )
    made = _started({}, parameter)
    adam = torch.optim.AdamW([parameter], fused=True)
    parameter.grad = torch.zeros(3)
    adam.step()
    theirs = adam.state[parameter]
    assert made.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (made[name].dtype, made[name].shape, made[name].device) == (
            tensor.dtype,
            tensor.shape,
            tensor.device,
        )


@pytest.mark.parametrize(
    ("dtype", "before", "after"),
    [("float32", 0, 3), ("float32", 3, 2), ("float32", 1, 0), ("bfloat16", 2, 3)],
)
def test_a_run_goes_on_at_another_zero_stage(
    base: Path, tmp_path: Path, dtype: str, before: int, after: int
) -> None:
    engine = make_engine(base, zero_stage=before, dtype=dtype)
    train(engine, 2)
    state, weights = state_of(engine), copied(engine)
    save(engine, tmp_path / "step000002")
    train(engine, 1)
    expected = copied(engine)
    engine.close()
    assert any(
        tensor.abs().max() > 0 for (_, kind), tensor in state.items() if kind == "exp_avg_sq"
    )
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}

    again = make_engine(base, zero_stage=after, dtype=dtype)
    assert load_checkpoint(again, tmp_path / "step000002") == POINT
    assert read_steps(again.deepspeed, trainable(again.policy.causal_lm)) == 2
    assert_equal(state_of(again), state)
    assert_equal(copied(again), weights)
    train(again, 1)  # sums in another order, and another epsilon beside the norm that clips
    for name, tensor in copied(again).items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=0, atol=2e-2 if dtype == "bfloat16" else 1e-4
        )
    again.close()


@pytest.mark.slow
def test_a_run_goes_on_with_three_ranks_and_back_with_one(base: Path, tmp_path: Path) -> None:
    """One rank at ZeRO 1, then three at ZeRO 3, whose parts of 64 elements are padded, then one at
    ZeRO 0.
    """
    engine = make_engine(base, zero_stage=1)
    train(engine, 2)
    save(engine, tmp_path / "one")
    state = state_of(engine)
    engine.close()
    store = host_ranks(LOOPBACK)
    # One process imports everything, and the ranks are its forks: this one has a group of its own
    # already.
    launcher = f"""
import os
from tests.learner.test_checkpoint import rank_of_three
ranks = []
for rank in range(3):
    ranks.append(os.fork())
    if not ranks[-1]:
        rank_of_three(rank, "{LOOPBACK}:{store.port}", {str(base)!r}, {str(tmp_path)!r})
        os._exit(0)
assert [os.waitpid(rank, 0)[1] for rank in ranks] == [0, 0, 0]
"""
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", launcher], cwd=root, start_new_session=True
    ) as process:
        try:
            assert process.wait(DEADLINE_S) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    files = {path.name for path in (tmp_path / "three").iterdir()}
    assert files == {
        f"{kind}-rank0000{rank}.safetensors" for kind in KINDS for rank in range(3)
    } | {"checkpoint.json"}
    saved = saved_tensors(tmp_path / "three", read_content(tmp_path / "three"))
    assert_equal({key: saved(*key) for key in state}, state)

    back = make_engine(base, zero_stage=0)
    assert load_checkpoint(back, tmp_path / "three trained") == replace(POINT, n_updates=3)
    assert not all(torch.equal(tensor, state[key]) for key, tensor in state_of(back).items())
    back.close()


def rank_of_three(rank: int, address: str, base: str, directory: str) -> None:
    """Loads "one" and saves it as "three"; then trains, saves "three trained", and goes on from
    there bit for bit.
    """
    deepspeed_setup.WHOLE_ELEMENTS = 0

    def engine() -> Engine:
        return make_engine(Path(base), zero_stage=3, ranks=3, rank=rank, address=address)

    first = engine()
    load_checkpoint(first, Path(directory) / "one")
    save_on_a_slow_disk(first, Path(directory) / "three")
    torch.manual_seed(1), np.random.seed(1), random.seed(1)  # all ranks draw the same data
    train(first, 1)
    save(first, Path(directory) / "three trained")
    straight, end = train(first, 1), copied(first)
    first.close()
    again = engine()
    load_checkpoint(again, Path(directory) / "three trained")
    assert train(again, 1) == straight
    assert_equal(copied(again), end)
    again.close()


def save_on_a_slow_disk(engine: Engine, dest: Path) -> None:
    """For rank 0 it takes until the other ranks are done: were they to wait for it, that would be
    for ever.
    """
    done = [dest.with_name(f"rank {rank} is done") for rank in range(engine.ranks)]

    def slow(directory: Path) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not all(path.exists() for path in done[1:]):
            assert time.monotonic() < deadline, "the other ranks wait for the disk"
            time.sleep(0.01)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("learner.files.atomic_directory._sync_files", slow)
        save(engine, dest)
    done[engine.rank].touch()


@pytest.fixture(scope="module")
def checkpoint(
    base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Path]]:
    """An engine that never stepped, and its checkpoint."""
    engine = make_engine(base, zero_stage=0)
    path = tmp_path_factory.mktemp("checkpoints") / "step000001"
    save(engine, path)
    yield engine, path
    engine.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", ["changed", "cut", "missing"])
def test_a_damaged_checkpoint_is_refused(
    checkpoint: tuple[Engine, Path], kind: str, damage: str
) -> None:
    engine, source = checkpoint
    path = source / f"{kind}-rank00000.safetensors"
    whole, before = path.read_bytes(), state_of(engine)
    if damage == "changed":
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif damage == "cut":
        path.write_bytes(whole[:-1])
    else:
        path.unlink()
    words = {"changed": "was changed after", "cut": "is not as long as", "missing": "is missing"}[
        damage
    ]
    with pytest.raises(
        CheckpointError, match=rf"step000001/{kind}-rank00000.*{words}.*use an older checkpoint"
    ):
        load_checkpoint(engine, source)
    assert_equal(state_of(engine), before)
    path.write_bytes(whole)
    load_checkpoint(engine, source)


def test_a_changed_description_is_refused_before_anything_is_loaded(
    checkpoint: tuple[Engine, Path],
) -> None:
    """A changed byte in a random state ended each start: no older checkpoint was taken."""
    engine, source = checkpoint
    point, before = source / "checkpoint.json", state_of(engine)
    whole = point.read_text()
    content = json.loads(whole)
    for old, new in (
        (f'"torch": "{content["random_states"][0]["torch"][:2]}', '"torch": "0x'),
        ('"n_updates": 0', '"n_updates": 7'),
        ('"adam_steps": 0', '"adam_steps": 1'),
    ):
        assert whole.count(old) >= 1
        point.write_text(whole.replace(old, new, 1))
        with pytest.raises(CheckpointError, match="is damaged .*it was changed after .*use an old"):
            load_checkpoint(engine, source)
        assert_equal(state_of(engine), before)
    del content["digest"]  # as of earlier versions
    point.write_text(json.dumps(content))
    load_checkpoint(engine, source)
    point.write_text(whole)
    load_checkpoint(engine, source)


def test_a_checkpoint_of_other_code_is_refused(
    checkpoint: tuple[Engine, Path], tmp_path: Path
) -> None:
    engine, _ = checkpoint
    with pytest.raises(CheckpointError, match="is not a whole checkpoint.*use an older"):
        load_checkpoint(engine, tmp_path / "step000007")
    point = tmp_path / "checkpoint.json"
    for text, words in (
        ("{", "checkpoint.json is damaged"),
        ("{}", "checkpoint.json is damaged"),
        ("[" * 100_000, "checkpoint.json is damaged"),
        ("[1]", "checkpoint.json is damaged"),
        ('{"format_version": "2"}', "checkpoint.json is damaged"),
        ('{"format_version": 2, "point": {}}', "checkpoint.json is damaged"),
        (
            '{"format_version": 1, "zero_stage": 2}',
            "has format version 1, this code reads 2; start the run anew",
        ),
        ('{"format_version": 99}', "has format version 99, this code reads 2; update the code"),
    ):
        point.write_text(text)
        with pytest.raises(CheckpointError, match=words):
            load_checkpoint(engine, tmp_path)


def test_a_checkpoint_of_another_model_is_refused(
    checkpoint: tuple[Engine, Path], tmp_path: Path
) -> None:
    _, source = checkpoint
    config = TinyModelConfig(vocabulary_size=280, hidden_size=64, layers=1)
    make_tiny_model(
        tmp_path / "other",
        tokenizer=train_tokenizer(["go north"] * 9, vocabulary_size=280),
        config=config,
        seed=0,
    )
    other = make_engine(tmp_path / "other", zero_stage=0)
    words = (
        r"12 trained parameters differ, the first is model\.layers\.1\.\S+, "
        r"of shape \[64, 64\] there and missing here"
    )
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(other, source)
    other.close()


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_weights_that_are_not_trained_are_not_written(
    base: Path, tmp_path: Path, zero_stage: int
) -> None:
    policy = load_policy(base, dtype="float32", gradient_checkpointing=False, temperature=1.0)
    add_adapters(policy.causal_lm, rank=2, alpha=4.0)
    learner = LearnerConfig(zero_stage=zero_stage)
    join_ranks(0, ranks=1, address=None)
    deepspeed = initialize(policy, dtype="float32", learner=learner)
    engine: Any = SimpleNamespace(
        policy=policy,
        critic=None,
        deepspeed=deepspeed,
        learner=learner,
        rank=0,
        ranks=1,
        n_updates=0,
    )
    save(engine, tmp_path / "step000001")
    names = set(read_content(tmp_path / "step000001").parameters)
    assert len(names) == 2 * 7 * 2  # two matrices for each of seven in each of two layers
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    before = state_of(engine)
    assert load_checkpoint(engine, tmp_path / "step000001").n_updates == 0
    assert_equal(state_of(engine), before)
    deepspeed.destroy()


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"a":' * 100_000,
        '{"format_version": "2"}',
        '{"format_version": [2]}',
        '{"format_version": 2, "point": 5}',
        CHECKPOINT % '"/etc/passwd"',
        CHECKPOINT % '"../step000002/master-rank00000.safetensors"',
        CHECKPOINT % "5",
    ],
)
def test_a_checkpoint_json_that_somebody_made_up_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "checkpoint.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"checkpoint\.json is damaged") as refused:
        read_content(tmp_path)
    assert "\n" not in str(refused.value)


MALFORMED: dict[str, Callable[[dict[str, Any]], object]] = {
    "parameters are a list": lambda content: content.update(parameters=[]),
    "parameters are null": lambda content: content.update(parameters=None),
    "a shape is text": lambda content: content.update(
        parameters=dict.fromkeys(content["parameters"], "x")
    ),
    "a kind is a list": lambda content: content["files"][0].update(kind=[]),
    "a kind is unknown": lambda content: content["files"][0].update(kind="slave"),
    "names are empty": lambda content: content["files"][0].update(names=[]),
    "names are text": lambda content: content["files"][0].update(names="x"),
    "no files": lambda content: content.update(files=[]),
}


def test_a_fifo_instead_of_checkpoint_json_is_one_line(tmp_path: Path) -> None:
    """Refuse a file that would block an export or a replay."""
    os.mkfifo(tmp_path / "checkpoint.json")
    with pytest.raises(CheckpointError, match="no regular file"):
        read_content(tmp_path)


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_fields_beside_files_with_fitting_digests_are_one_line(
    checkpoint: tuple[Engine, Path], tmp_path: Path, what: str
) -> None:
    source = tmp_path / "step000001"
    shutil.copytree(checkpoint[1], source)
    content = json.loads((source / "checkpoint.json").read_text())
    MALFORMED[what](content)
    (source / "checkpoint.json").write_text(json.dumps(content))
    assert_refused_in_one_line(source)


@pytest.mark.parametrize("change", ["shape", "missing", "integers", "no tensors"])
def test_tensors_that_are_not_the_parameters_are_one_line_although_their_digest_fits(
    checkpoint: tuple[Engine, Path], tmp_path: Path, change: str
) -> None:
    source = tmp_path / "step000001"
    shutil.copytree(checkpoint[1], source)
    content = json.loads((source / "checkpoint.json").read_text())
    files = content["files"][0]
    (path,) = (source / name for name in files["names"])
    tensors = load_file(path)
    first = min(tensors)
    if change == "shape":
        tensors[first] = tensors[first].flatten()[1:].clone()
    elif change == "missing":
        del tensors[first]
    elif change == "integers":
        tensors[first] = tensors[first].to(torch.int32)
    save_file(tensors, path)
    if change == "no tensors":
        path.write_bytes(b"x" * 50)
    files.update(n_bytes=path.stat().st_size, digest=files_digest([path]))
    (source / "checkpoint.json").write_text(json.dumps(content))
    assert_refused_in_one_line(source)


def assert_refused_in_one_line(source: Path) -> None:
    with pytest.raises(CheckpointError, match="use an older checkpoint") as refused:
        saved_tensors(source, read_content(source))
    assert "\n" not in str(refused.value)


def test_an_interrupted_save_is_never_seen(
    checkpoint: tuple[Engine, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = checkpoint

    def killed(record: Any) -> dict[str, Any]:
        if isinstance(record, Content):  # that of checkpoint.json, which is written last
            raise KeyboardInterrupt
        return asdict(record)

    monkeypatch.setattr("learner.checkpoint.asdict", killed)
    with pytest.raises(KeyboardInterrupt):
        save(engine, tmp_path / "step000001")
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["step000001.tmp"]
    with pytest.raises(CheckpointError, match="is not a whole checkpoint"):
        load_checkpoint(engine, tmp_path / "step000001.tmp")
    save(engine, tmp_path / "step000001")
    assert [path.name for path in tmp_path.iterdir()] == ["step000001"]
    assert (
        json.loads((tmp_path / "step000001" / "checkpoint.json").read_text())["point"]["lsn"]
        == POINT.lsn
    )


@pytest.mark.parametrize(
    "zero_stage",
    [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3],
)
def test_on_a_full_disk_the_older_checkpoint_stays_and_a_later_try_works(
    base: Path, tmp_path: Path, zero_stage: int
) -> None:
    engine = make_engine(base, zero_stage=zero_stage)
    train(engine, 1)
    save(engine, tmp_path / "measured")
    files = sorted((tmp_path / "measured").iterdir())
    n_bytes = sum(math.ceil(file.stat().st_size / PAGE_BYTES) * PAGE_BYTES for file in files)
    (disk := tmp_path / "disk").mkdir()
    with mounted(disk, "-t", "tmpfs", "-o", f"size={3 * n_bytes},nr_inodes=64", "none"):
        save(engine, disk / "step000001")
        older, weights = state_of(engine), copied(engine)
        train(engine, 1)
        # Room for nothing, for part of the first file, for two of the three, and for all but
        # checkpoint.json.
        for room in (0, n_bytes // 6, n_bytes * 5 // 6, n_bytes - PAGE_BYTES):
            filler = disk / "filler"
            filler.write_bytes(bytes(shutil.disk_usage(disk).free - room))
            with pytest.raises(
                OSError,
                match=f"cannot write {disk}/step000002: No space left on device; free space",
            ) as full:
                save(engine, disk / "step000002")
            assert "\n" not in str(full.value)
            # what was written takes no space
            assert sorted(path.name for path in disk.iterdir()) == ["filler", "step000001"]
            filler.unlink()
        newer = state_of(engine)
        again = make_engine(base, zero_stage=zero_stage)
        assert load_checkpoint(again, disk / "step000001") == replace(POINT, n_updates=1)
        assert_equal(state_of(again), older)
        assert_equal(copied(again), weights)
        save(engine, disk / "step000002")
        load_checkpoint(again, disk / "step000002")
        assert_equal(state_of(again), newer)
        again.close()
    engine.close()


def test_pruning_leaves_what_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that NFS made ended the run, and a directory of a person was removed."""
    for name in ("step000001", "step000002.tmp", "best"):
        (tmp_path / name).mkdir()
    (tmp_path / ".nfs000000000001").write_bytes(b"")
    prune_checkpoints(tmp_path, kept=lambda names: set())
    assert sorted(path.name for path in tmp_path.iterdir()) == [".nfs000000000001", "best"]
    (tmp_path / "step000003").mkdir()

    def refuse(path: Path) -> None:
        raise OSError(errno.ENOTEMPTY, "a file in it is read", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    prune_checkpoints(tmp_path, kept=lambda names: set())


def test_a_directory_is_written_anew_beside_what_nfs_keeps_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the run, and every start after it."""
    removed: list[str] = []

    def keep_one_file(path: Path, **_: object) -> None:
        removed.append(path.name)
        raise OSError(errno.EBUSY, "a file in it is read", str(path))

    for name in ("step000001", "step000001.tmp", "step000001.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".nfs000000000001").write_bytes(b"")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", keep_one_file)
        with atomic_directory(tmp_path / "step000001") as unfinished:
            (unfinished / "new").write_bytes(b"")
    assert [path.name for path in (tmp_path / "step000001").iterdir()] == ["new"]
    assert removed == ["step000001.tmp", "step000001.old", "step000001.old"]
    prune_checkpoints(tmp_path, kept=lambda names: {"step000001"})
    assert [path.name for path in tmp_path.iterdir()] == ["step000001"]


def test_pruning_keeps_the_last_and_those_that_are_kept_for_ever(tmp_path: Path) -> None:
    steps = (5, 10, 15, 20, 25, 30)

    def left(*, keep: int, keep_every: int, live: Iterable[int] = steps) -> list[int]:
        for step in steps:
            (tmp_path / f"step{step:06d}").mkdir(exist_ok=True)
        names = {f"step{step:06d}" for step in live}
        kept = partial(kept_checkpoints, live=names, keep=keep, keep_every=keep_every)
        prune_checkpoints(tmp_path, kept=kept)
        return sorted(int(path.name.removeprefix("step")) for path in tmp_path.iterdir())

    assert left(keep=2, keep_every=0) == [25, 30]
    assert left(keep=2, keep_every=10) == [10, 20, 25, 30]
    assert left(keep=1, keep_every=25) == [25, 30]
    # 30 could not be loaded, 25 could not either: the run fell back to 20, which stays beside the
    # one just written.
    for written in (23, 27, 33):
        (tmp_path / f"step{written:06d}").mkdir()
        assert left(keep=2, keep_every=25, live=(5, 10, 15, 20, written)) == [20, written]
        (tmp_path / f"step{written:06d}").rmdir()
    (tmp_path / "step000035.tmp").mkdir()
    assert left(keep=6, keep_every=0) == [5, 10, 15, 20, 25, 30]
