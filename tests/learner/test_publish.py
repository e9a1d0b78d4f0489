from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs import ConfigError, TinyModelConfig
from learner.files.atomic_directory import (
    atomic_directory,
    new_directory,
    prune_oldest,
    sync_whole,
)
from learner.model.policy_model import PolicyModel, load_policy
from learner.model.tiny_model import make_tiny_model, train_tokenizer
from learner.publishing import copy_model, publish
from learner.publishing.copy_model import copy_file, copy_weights
from learner.publishing.publish import (
    DTYPE_NAMES,
    WeightsCopy,
    write_shards,
    write_weights,
)
from store import StoreError, check_file_links, files_digest, weight_files
from store.file_rights import ACCESS_LISTS
from tests.support.file_modes import let_one_user_read
from tests.support.neighbours import Neighbour


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "base"
    config = TinyModelConfig(vocabulary_size=280, hidden_size=32, layers=1)
    make_tiny_model(
        path,
        tokenizer=train_tokenizer(["go north"] * 9, vocabulary_size=280),
        config=config,
        seed=0,
    )
    return path


@pytest.fixture
def policy(base: Path) -> PolicyModel:
    return load_policy(base, dtype="float32", gradient_checkpointing=False, temperature=1.0)


def weights(policy: PolicyModel) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.detach()) for name, tensor in policy.causal_lm.named_parameters()]


def assert_same_model(directory: Path, policy: PolicyModel) -> None:
    loaded, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    live = policy.causal_lm.state_dict()
    assert set(loaded.state_dict()) == set(live)
    assert all(torch.equal(tensor, live[name]) for name, tensor in loaded.state_dict().items())


def test_a_published_directory_loads_and_equals_the_live_weights(
    base: Path, policy: PolicyModel, tmp_path: Path
) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.125)
    digest = write_weights(weights(policy), tmp_path / "v000001", source_dir=base)
    assert digest == files_digest([tmp_path / "v000001" / "model.safetensors"])
    assert_same_model(tmp_path / "v000001", policy)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "v000001")
    assert tokenizer.encode("go north") == AutoTokenizer.from_pretrained(base).encode("go north")
    assert [path.name for path in tmp_path.iterdir()] == ["v000001"]


def test_a_large_model_is_written_in_files_without_holding_more_than_one(
    base: Path, policy: PolicyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "SHARD_BYTES", 20_000)
    alive: list[weakref.ref[torch.Tensor]] = []
    largest = 0

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal largest
        for name, tensor in weights(policy):
            copy = tensor.clone()
            alive.append(weakref.ref(copy))
            largest = max(
                largest,
                sum(held.nbytes for reference in alive if (held := reference()) is not None),
            )
            yield name, copy

    digest = write_weights(gathered(), tmp_path / "v", source_dir=base)
    assert sum(tensor.nbytes for _, tensor in weights(policy)) > 3 * 20_000
    # larger than a file is meant to be
    embedding_bytes = policy.causal_lm.get_input_embeddings().weight.nbytes
    assert largest <= embedding_bytes + 20_000
    names = [path.name for path in weight_files(tmp_path / "v")]
    assert len(names) > 2
    assert names == [
        f"model-{n:05d}-of-{len(names):05d}.safetensors" for n in range(1, len(names) + 1)
    ]
    assert (
        digest
        == blake3(b"".join((tmp_path / "v" / name).read_bytes() for name in names)).hexdigest()
    )
    assert_same_model(tmp_path / "v", policy)


def test_the_digest_is_of_the_weights_and_changes_with_any_of_them(
    base: Path, policy: PolicyModel, tmp_path: Path
) -> None:
    first = write_weights(weights(policy), tmp_path / "first", source_dir=base)
    assert write_weights(weights(policy), tmp_path / "same", source_dir=base) == first
    digests = {first}
    for name, tensor in weights(policy):
        with torch.no_grad():
            tensor.view(-1)[-1] += 1.0
        digests.add(write_weights(weights(policy), tmp_path / name, source_dir=base))
    assert len(digests) == 1 + len(weights(policy))


def test_the_recorded_dtype_is_that_of_the_weights(
    base: Path, policy: PolicyModel, tmp_path: Path
) -> None:
    halved = {name: tensor.bfloat16() for name, tensor in weights(policy)}
    write_weights(halved.items(), tmp_path / "v", source_dir=base)
    assert json.loads((tmp_path / "v" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "v", dtype="auto").state_dict()
    assert torch.equal(loaded["model.norm.weight"], halved["model.norm.weight"])
    with pytest.raises(ValueError, match=r"one dtype, not \['torch.bfloat16', 'torch.float32'\]"):
        write_weights((halved | {"x": torch.zeros(1)}).items(), tmp_path / "w", source_dir=base)


def test_shard_indices_of_the_base_model_are_not_copied(
    base: Path, policy: PolicyModel, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text((base / "config.json").read_text())
    (source / "model.safetensors.index.json").write_text("{}")
    (source / "model-00001-of-00002.safetensors").write_text("")
    write_weights(weights(policy), tmp_path / "v", source_dir=source)
    assert sorted(path.name for path in (tmp_path / "v").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_a_writer_that_dies_leaves_nothing_visible_and_the_next_one_succeeds(
    tmp_path: Path,
) -> None:
    dest = tmp_path / "v000001"

    def die_half_way() -> None:
        with atomic_directory(dest) as unfinished:
            (unfinished / "half").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        die_half_way()
    assert not dest.exists()
    for text in ("whole", "again"):  # the second finds a directory that nobody was told of
        with atomic_directory(dest) as unfinished:
            assert list(unfinished.iterdir()) == []
            (unfinished / "file").write_text(text)
            assert not dest.exists() or (dest / "file").read_text() == "whole"
        assert (dest / "file").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["v000001"]


def test_a_writer_of_weights_that_dies_leaves_nothing_visible(
    base: Path, policy: PolicyModel, tmp_path: Path
) -> None:
    def die_half_way() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights(policy)[:3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_weights(die_half_way(), tmp_path / "v000001", source_dir=base)
    assert not list(tmp_path.iterdir())
    write_weights(weights(policy), tmp_path / "v000001", source_dir=base)
    assert [path.name for path in tmp_path.iterdir()] == ["v000001"]


def test_a_new_directory_replaces_and_removes_nothing(tmp_path: Path) -> None:
    """The destination appears while it is written; somebody else's files stay beside it."""
    dest = tmp_path / "mine"
    (tmp_path / "mine.old").mkdir()
    (tmp_path / "mine.tmp").mkdir()

    def overtaken() -> None:
        with new_directory(dest) as unfinished:
            (unfinished / "file").write_text("x")
            dest.symlink_to(tmp_path / "nowhere")

    with pytest.raises(FileExistsError, match="choose another directory"):
        overtaken()
    assert dest.is_symlink()
    dest.unlink()
    with new_directory(dest) as unfinished:
        (unfinished / "file").write_text("x")
        assert not dest.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "mine.old", "mine.tmp"]


def test_a_copy_is_written_while_the_weights_change(
    base: Path, policy: PolicyModel, tmp_path: Path
) -> None:
    """Every version has the weights, and the digest, of the moment at which it was copied."""
    copy, digests = WeightsCopy(), []
    for version in range(3):
        digests.append(copy.take(weights(policy)))
        expected = {name: tensor.clone() for name, tensor in weights(policy)}
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.125)
        copy.write(tmp_path / f"v{version}", source_dir=base, send=None)
        assert digests[-1] == files_digest([tmp_path / f"v{version}" / "model.safetensors"])
        written = load_file(tmp_path / f"v{version}" / "model.safetensors")
        assert written.keys() == expected.keys()
        assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    assert len({*digests}) == 3
    write_weights(expected.items(), tmp_path / "same", source_dir=base)
    same = {path.name: path.read_bytes() for path in (tmp_path / "same").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "v2").iterdir()} == same


def test_a_copy_in_several_files_has_their_digest(
    base: Path, policy: PolicyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "SHARD_BYTES", 20_000)
    copy = WeightsCopy()
    digest = copy.take(weights(policy))
    copy.write(tmp_path / "v", source_dir=base, send=None)
    assert len(weight_files(tmp_path / "v")) > 2
    assert digest == files_digest(weight_files(tmp_path / "v"))


def test_the_files_of_a_copy_are_sent_as_they_are_written(
    base: Path, policy: PolicyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "SHARD_BYTES", 20_000)
    copy, sent = WeightsCopy(), list[bytes]()
    copy.take(weights(policy))
    copy.write(tmp_path / "v", source_dir=base, send=lambda parts: sent.append(b"".join(parts)))
    assert len(sent) > 2
    assert sent == [file.read_bytes() for file in weight_files(tmp_path / "v")]


def test_an_error_of_the_sender_is_raised_and_the_files_are_there(
    base: Path, policy: PolicyModel, tmp_path: Path
) -> None:
    def failing(parts: Sequence[memoryview]) -> None:
        raise ValueError("a fault")

    copy = WeightsCopy()
    digest = copy.take(weights(policy))
    with pytest.raises(ValueError, match="a fault"):
        copy.write(tmp_path / "v", source_dir=base, send=failing)
    assert files_digest(weight_files(tmp_path / "v")) == digest


def test_a_copy_that_changed_is_not_published(
    base: Path, policy: PolicyModel, tmp_path: Path
) -> None:
    copy = WeightsCopy()
    copy.take(weights(policy))
    next(iter(copy._tensors.values())).view(-1)[0] += 1.0
    with pytest.raises(StoreError, match="v000001 was announced with digest .* is not sound"):
        copy.write(tmp_path / "v000001", source_dir=base, send=None)
    assert not (tmp_path / "v000001").exists()


def test_published_weights_are_synced(
    base: Path, policy: PolicyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file, the directory and its name."""
    synced: set[str] = set()

    def noting(descriptor: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", noting)
    copy = WeightsCopy()
    copy.take(weights(policy))
    copy.write(tmp_path / "v000001", source_dir=base, send=None)
    sync_whole(tmp_path / "v000001")
    written = [tmp_path, *tmp_path.rglob("*")]
    assert len(written) == 2 + len(list(base.iterdir()))
    assert {str(path) for path in written} <= synced


def test_a_disk_that_fails_is_told_with_the_version_it_failed_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    (tmp_path / "v000001").mkdir()
    with pytest.raises(
        OSError,
        match=r"v000001 may be lost at a power cut \(Input/output error\); look at the disk",
    ):
        sync_whole(tmp_path / "v000001")


TENSORS = st.lists(
    st.tuples(
        st.sampled_from(sorted(DTYPE_NAMES, key=str)), st.lists(st.integers(0, 4), max_size=3)
    ),
    max_size=8,
)


@given(kinds=TENSORS, shard_bytes=st.sampled_from([1, 64, 10_000]), seed=st.integers(0, 9))
def test_safetensors_reads_what_was_written(
    kinds: list[tuple[torch.dtype, list[int]]],
    shard_bytes: int,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    directory = tmp_path_factory.mktemp("shards")
    tensors = {}
    for number, (dtype, shape) in enumerate(kinds):
        drawn = torch.randint(0, 2, shape, generator=generator).to(dtype)
        tensors[f"t{number}"] = drawn.transpose(0, -1) if shape else drawn  # not contiguous
    written = write_shards(tensors.items(), directory, stem="x", shard_bytes=shard_bytes)
    files = sorted(directory.iterdir())
    assert [file.name for file in files] == list(written.files)
    assert (
        written.digest
        == files_digest(files)
        == blake3(b"".join(file.read_bytes() for file in files)).hexdigest()
    )
    assert written.n_bytes == sum(file.stat().st_size for file in files)
    read = {name: (file.name, tensor) for file in files for name, tensor in load_file(file).items()}
    assert {name: file for name, (file, _) in read.items()} == written.file_of
    for name, tensor in tensors.items():
        assert read[name][1].dtype == tensor.dtype
        assert torch.equal(read[name][1], tensor)


def test_files_are_cut_between_tensors(tmp_path: Path) -> None:
    five = [(name, torch.zeros(1)) for name in "abcde"]
    written = write_shards(five, tmp_path, stem="x", shard_bytes=8)
    first, second, third = (f"x-0000{n}-of-00003.safetensors" for n in (1, 2, 3))
    assert written.file_of == {"a": first, "b": first, "c": second, "d": second, "e": third}
    with pytest.raises(ValueError, match="z is torch.complex64"):
        write_shards(
            [("z", torch.zeros(1, dtype=torch.complex64))],
            tmp_path,
            stem="y",
            shard_bytes=8,
        )


def test_a_copy_is_whole(base: Path, tmp_path: Path) -> None:
    copy_weights(base, tmp_path / "copy", follow_links=False)
    assert {p.name: p.read_bytes() for p in base.iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "copy").iterdir()
    }


@pytest.mark.parametrize("name", ["config.json", "notes.txt", "model.safetensors"])
def test_no_link_of_another_user_gets_a_private_file_into_a_run(
    name: str,
    base: Path,
    policy: PolicyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The attack: beside a shared model lay `notes.txt`, a link to a private key of whoever trained
    it. Everybody could read it in the run's weights.
    """
    shared, private = tmp_path / "shared", tmp_path / "private"
    shutil.copytree(base, shared)
    shutil.copyfile(base / (name if (base / name).exists() else "config.json"), private)
    private.chmod(0o600)
    (shared / name).unlink(missing_ok=True)
    (shared / name).symlink_to(private)
    copy_weights(shared, tmp_path / "own", follow_links=True)
    assert (tmp_path / "own" / name).read_bytes() == private.read_bytes()
    assert (tmp_path / "own" / name).stat().st_mode & 0o777 == 0o600
    write_weights(weights(policy), tmp_path / "own version", source_dir=shared)
    neighbour = Neighbour(monkeypatch)
    neighbour.gets(shared / name)
    if name != "model.safetensors":  # of the weights only what was loaded is written
        with pytest.raises(StoreError, match=f"{name} is a link of another user .uid 65534.*copy"):
            write_weights(weights(policy), tmp_path / "version", source_dir=shared)
    with pytest.raises(StoreError, match=f"{name} is a link of another user"):
        copy_weights(shared, tmp_path / "copy", follow_links=True)
    with pytest.raises(StoreError, match=f"{name} is a link of another user"):
        load_policy(shared, dtype="float32", gradient_checkpointing=False, temperature=1.0)
    assert not (tmp_path / "version").exists() and not (tmp_path / "copy").exists()
    neighbour.gives_back(shared / name)
    (shared / "more").mkdir()
    (shared / "more" / "deep").symlink_to(private)
    neighbour.gets(shared / "more" / "deep")
    with pytest.raises(StoreError, match="deep is a link of another user"):  # a template is read
        load_policy(shared, dtype="float32", gradient_checkpointing=False, temperature=1.0)
    (shared / "more" / "round").symlink_to(shared)
    neighbour.gives_back(shared / "more" / "deep")
    (shared / "and round").symlink_to(shared)
    with pytest.raises(StoreError, match="links lead round in a circle"):
        load_policy(shared, dtype="float32", gradient_checkpointing=False, temperature=1.0)
    with pytest.raises(StoreError, match="links lead round in a circle"):
        copy_weights(shared, tmp_path / "copy", follow_links=True)


def test_links_that_show_a_few_directories_on_endless_paths_are_refused_soon(
    base: Path, tmp_path: Path
) -> None:
    """The attack: beside a shared model lay seven directories, each with sixty links to the next.

    There was no circle, and nothing was too deep. Looking at every path would take months.
    """
    shared = tmp_path / "shared"
    shutil.copytree(base, shared)
    for level in range(7):
        directory = tmp_path / f"level {level}"
        directory.mkdir()
        for number in range(60):
            (directory / f"{number}").symlink_to(tmp_path / f"level {level + 1}")
    (tmp_path / "level 7").mkdir()
    (shared / "more").symlink_to(tmp_path / "level 1")
    with pytest.raises(StoreError, match="shared has more than 5,000 files .*model alone"):
        load_policy(shared, dtype="float32", gradient_checkpointing=False, temperature=1.0)
    with pytest.raises(StoreError, match="shared has more than 5,000 files"):
        copy_weights(shared, tmp_path / "copy", follow_links=True)
    assert not (tmp_path / "copy").exists()


def test_a_model_that_grows_while_it_is_copied_is_refused(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: after the look, a directory of it was exchanged for a link to endless paths."""
    shared, endless = tmp_path / "shared", tmp_path / "endless"
    shutil.copytree(base, shared)
    (shared / "more").mkdir()
    endless.mkdir()
    for number in range(99):
        (endless / f"{number}").symlink_to(endless)

    def grows(directory: Path) -> None:
        check_file_links(directory)
        (shared / "more").rmdir()
        (shared / "more").symlink_to(endless)

    monkeypatch.setattr(copy_model, "check_file_links", grows)
    with pytest.raises(StoreError, match="more than 5,000 files|round in a circle"):
        copy_weights(shared, tmp_path / "copy", follow_links=True)
    assert not (tmp_path / "copy").exists()


def test_files_that_stand_for_more_bytes_than_they_have_fill_no_disk(
    base: Path, policy: PolicyModel, tmp_path: Path
) -> None:
    """The attack: beside a shared model lay a text of 15 TiB, which took no room there.

    Each version that was published got a copy, with its zeros.
    """
    shared = tmp_path / "shared"
    shutil.copytree(base, shared)
    with (shared / "notes.bin").open("wb") as notes:
        notes.truncate(2**30)
    copy_weights(shared, tmp_path / "copy", follow_links=True)
    copied = (tmp_path / "copy" / "notes.bin").stat()
    assert copied.st_size == 2**30 and 512 * copied.st_blocks < 2**20
    with (shared / "merges.txt").open("wb") as merges:
        merges.truncate(2**40)
    with pytest.raises(StoreError, match="shared beside its weights have .* no model has so much"):
        write_weights(weights(policy), tmp_path / "version", source_dir=shared)
    assert not (tmp_path / "version").exists()


def test_a_model_whose_owner_holds_up_its_readers_is_refused_at_once(
    base: Path, tmp_path: Path
) -> None:
    """The attack: a program of the owner had a write lease on each file of a shared model.

    The system lets whoever opens such a file wait for 45 s, and the program took the lease again.
    """
    shared = tmp_path / "shared"
    shutil.copytree(base, shared)
    tokenizer, config = (shared / name for name in ("tokenizer.json", "config.json"))
    signal_before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    try:
        for held in (tokenizer, config):
            with held.open("r+b") as lease:
                fcntl.fcntl(lease, fcntl.F_SETLEASE, fcntl.F_WRLCK)
                with pytest.raises(
                    (StoreError, ConfigError), match=f"{held.name} is held by a lease"
                ):
                    copy_weights(shared, tmp_path / "copy", follow_links=True)
                with pytest.raises(
                    (StoreError, ConfigError), match=f"{held.name} is held by a lease"
                ):
                    load_policy(
                        shared, dtype="float32", gradient_checkpointing=False, temperature=1.0
                    )
    finally:
        signal.signal(signal.SIGIO, signal_before)
    copy_weights(shared, tmp_path / "copy", follow_links=True)


def test_a_copy_is_no_more_open_than_the_umask_and_the_model_say(
    base: Path, tmp_path: Path
) -> None:
    """The attack: of a model in a directory for all a run got one whose files anybody exchanged."""
    model = tmp_path / "model"
    shutil.copytree(base, model)
    (model / "more").mkdir()
    (model / "more" / "file").write_text("x")
    for path in (model, model / "more", *model.glob("*.json"), model / "more" / "file"):
        path.chmod(0o777)
    copy_weights(model, tmp_path / "open", follow_links=True)
    made = [tmp_path / "open", *(tmp_path / "open").rglob("*")]
    assert len(made) > 5 and [path for path in made if path.stat().st_mode & 0o022] == []
    model.chmod(0o700)
    copy_weights(model, tmp_path / "private", follow_links=True)
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another group")
def test_a_copy_is_no_setuid_program_and_not_for_another_group(base: Path, tmp_path: Path) -> None:
    """The attack: root's copy of a neighbour's program, setuid, in the weights. Also, a team's model
    became one of the copier's own group.
    """
    model = tmp_path / "model"
    shutil.copytree(base, model)
    os.chown(model, 0, 1234)
    model.chmod(0o750)
    for path in model.iterdir():
        os.chown(path, 0, 1234)
        path.chmod(0o6750)
    (model / "config.json").chmod(0o705)  # for all but the team
    copy_weights(model, tmp_path / "copy", follow_links=True)
    assert {path.stat().st_mode & 0o7777 for path in (tmp_path / "copy").iterdir()} == {0o700}
    assert (tmp_path / "copy").stat().st_mode & 0o7777 == 0o700


def test_a_copy_is_not_for_a_group_that_an_access_list_kept_out(base: Path, tmp_path: Path) -> None:
    """The attack: a model was for one colleague. Its copy was for the whole group."""
    model = tmp_path / "model"
    shutil.copytree(base, model)
    for path in (*model.iterdir(), model):
        let_one_user_read(path, user=1234, rights=5)
        assert path.stat().st_mode & 0o777 == 0o750
    copy_weights(model, tmp_path / "copy", follow_links=True)
    made = tmp_path / "copy"
    assert {path.stat().st_mode & 0o777 for path in (*made.iterdir(), made)} == {0o700}


def test_a_copy_is_not_for_whom_the_directory_above_lets_in(base: Path, tmp_path: Path) -> None:
    """The attack: a model was for a group. Its copy was for one user more, of a default list."""
    model, runs = tmp_path / "model", tmp_path / "runs"
    shutil.copytree(base, model)
    for path in (*model.iterdir(), model):
        path.chmod(0o750)
    runs.mkdir()
    let_one_user_read(runs, user=1234, rights=5, name=ACCESS_LISTS[1])
    copy_weights(model, runs / "copy", follow_links=True)
    copy_file(model / "config.json", runs / "config.json")
    for path in (runs / "copy", *(runs / "copy").iterdir(), runs / "config.json"):
        assert not set(ACCESS_LISTS) & set(os.listxattr(path)), path
        assert path.stat().st_mode & 0o777 == 0o750


def test_pruning_keeps_the_newest_and_removes_what_dead_writers_left(tmp_path: Path) -> None:
    dead = ("v000012.tmp", "v000008.old", ".v000003.7-ab.tmp", "v000003.tmp.7f.old")
    for name in ("v000009", "v999999", "v1000000", "v000008.best", *dead):
        (tmp_path / name).mkdir()
    prune_oldest(tmp_path, keep=2)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"v999999", "v1000000", "v000008.best"}
    with pytest.raises(ValueError, match="keep=0"):
        prune_oldest(tmp_path, keep=0)


def test_a_version_that_is_a_link_to_somebodys_model_goes_and_the_model_stays(
    tmp_path: Path,
) -> None:
    model, weights_dir = tmp_path / "model", tmp_path / "weights"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"not ours")
    (weights_dir / "v000001").mkdir(parents=True)
    (weights_dir / "v000000").symlink_to(model)
    prune_oldest(weights_dir, keep=1)
    assert [path.name for path in weights_dir.iterdir()] == ["v000001"]
    assert (model / "model.safetensors").read_bytes() == b"not ours"
