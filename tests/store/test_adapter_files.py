"""Check published adapters by hand-made files: what fits passes, anything else is named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from store import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    OpenedVersion,
    TensorEntry,
    WeightFileError,
    check_adapter,
    copy_adapter,
    encode_safetensors_head,
    is_adapter,
    tensor_shapes,
    write_base,
)
from store.adapter_files import adapter_shapes
from store.errors import UnsafePathError

BASE = {
    "model.embed_tokens.weight": [20, 6],
    "model.layers.0.self_attn.q_proj.weight": [8, 6],
    "model.layers.0.self_attn.q_proj.bias": [8],
    "model.layers.0.mlp.up_proj.weight": [10, 6],
}
TENSORS = {
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": [2, 6],
    "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": [8, 2],
    "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": [2, 6],
    "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight": [10, 2],
}
SETTINGS = {"r": 2, "lora_alpha": 4.0, "target_modules": ["mlp.up_proj", "q_proj"]}


def write(path: Path, shapes: dict[str, list[int]]) -> None:
    """Write a file of zeros."""
    entries, begin = [], 0
    for name, shape in shapes.items():
        end = begin + 4 * shape[0] * shape[-1]
        entries.append(TensorEntry(name=name, dtype="F32", shape=shape, begin=begin, end=end))
        begin = end
    path.write_bytes(encode_safetensors_head(entries) + bytes(begin))


def copied(adapter: Path, dest: Path) -> None:
    directory = os.open(adapter, os.O_RDONLY | os.O_DIRECTORY)
    try:
        copy_adapter(OpenedVersion(directory=directory, path=adapter), dest)
    finally:
        os.close(directory)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    directory = tmp_path / "v000003"
    directory.mkdir()
    write(directory / ADAPTER_FILE, TENSORS)
    (directory / ADAPTER_CONFIG_FILE).write_text(json.dumps(SETTINGS))
    write_base(directory, digest="ab12")
    return directory


def check(directory: Path, *, rank: int = 2, alpha: float = 4.0, digest: str = "ab12") -> None:
    check_adapter(directory, rank=rank, alpha=alpha, base_shapes=BASE, base_digest=digest)


def test_an_adapter_of_the_run_passes(adapter: Path) -> None:
    assert is_adapter(adapter)
    assert tensor_shapes(adapter / ADAPTER_FILE) == TENSORS
    check(adapter)


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        ({"rank": 4}, "has r=2, the run has model.lora_rank=4"),
        ({"alpha": 8.0}, "has lora_alpha=4.0, the run has model.lora_alpha=8.0"),
        ({"digest": "cd34"}, "a base model with digest ab12, and the base model here has cd34"),
    ],
)
def test_another_runs_adapter_is_refused(
    adapter: Path, expected: dict[str, float], words: str
) -> None:
    with pytest.raises(WeightFileError, match=words):
        check(adapter, **expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"base_model.model.model.layers.0.mlp.up_proj.lora_B.weight": None},
            r"1 tensors differ, the first is \S+up_proj.lora_B.weight, of shape missing here and "
            r"\[10, 2\] there",
        ),
        (
            {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": [3, 6]},
            r"of shape \[3, 6\] here and \[2, 6\] there",
        ),
        (
            {"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": [2, 6]},
            r"layers.9.mlp.up_proj.lora_A.weight, of shape \[2, 6\] here and missing there",
        ),
    ],
)
def test_missing_and_other_tensors_are_refused(
    adapter: Path, changes: dict[str, list[int] | None], words: str
) -> None:
    tensors = TENSORS | changes
    write(adapter / ADAPTER_FILE, {name: shape for name, shape in tensors.items() if shape})
    with pytest.raises(WeightFileError, match=words):
        check(adapter)


def test_whole_weights_are_no_adapter(adapter: Path) -> None:
    (adapter / ADAPTER_CONFIG_FILE).unlink()
    assert not is_adapter(adapter)
    with pytest.raises(WeightFileError, match=r"model\.lora_serving=merged"):
        check(adapter)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (ADAPTER_CONFIG_FILE, b"{", "adapter_config.json is not JSON"),
        (ADAPTER_CONFIG_FILE, b"[]", "adapter_config.json is no JSON object"),
        (
            ADAPTER_CONFIG_FILE,
            b'{"r": 2, "lora_alpha": 4.0, "target_modules": "all-linear"}',
            "target_modules='all-linear', which is no list",
        ),
        ("base.json", None, "base.json is not there"),
        (ADAPTER_FILE, None, "no weights at"),
        (ADAPTER_FILE, b"\xff" * 8, "is not a whole safetensors file"),
        (ADAPTER_FILE, b"\x02" + bytes(7) + b"[]", "is not a whole safetensors file"),
    ],
)
def test_damaged_files_are_named(
    adapter: Path, name: str, content: bytes | None, words: str
) -> None:
    if content is None:
        (adapter / name).unlink()
    else:
        (adapter / name).write_bytes(content)
    with pytest.raises(WeightFileError, match=words):
        check(adapter)


@pytest.mark.parametrize("name", [ADAPTER_CONFIG_FILE, "base.json", ADAPTER_FILE])
@pytest.mark.parametrize("kind", ["link", "device", "fifo", "directory"])
def test_a_copy_takes_no_other_file(adapter: Path, tmp_path: Path, name: str, kind: str) -> None:
    """Refuse links and special files also where no command has looked for them before."""
    dest = tmp_path / "copy"
    dest.mkdir()
    (tmp_path / "secret").write_text('{"digest": "ab12"}')
    (adapter / name).unlink()
    if kind == "fifo":
        os.mkfifo(adapter / name)
    elif kind == "directory":
        (adapter / name).mkdir()
    else:
        target = tmp_path / "secret" if kind == "link" else Path("/dev/zero")
        (adapter / name).symlink_to(target)
    with pytest.raises((UnsafePathError, IsADirectoryError)):
        copied(adapter, dest)
    assert not (dest / name).exists()
    if name != ADAPTER_FILE:
        with pytest.raises(WeightFileError):
            check(adapter)


@pytest.mark.parametrize("name", [ADAPTER_CONFIG_FILE, "base.json"])
def test_a_description_of_any_size_is_not_read(adapter: Path, tmp_path: Path, name: str) -> None:
    with (adapter / name).open("r+b") as file:
        file.truncate(2**42)  # a sparse file
    with pytest.raises(WeightFileError, match="publish the adapter again"):
        check(adapter)
    with pytest.raises(UnsafePathError):
        copied(adapter, tmp_path)


def test_an_adapter_that_names_code_is_not_copied(adapter: Path, tmp_path: Path) -> None:
    """peft's AutoPeftModel imports the module that it names."""
    mapping = {"base_model_class": "Model", "parent_library": "payload_of_a_run"}
    config = adapter / ADAPTER_CONFIG_FILE
    config.write_text(json.dumps({**SETTINGS, "auto_mapping": mapping}))
    with pytest.raises(WeightFileError, match="'auto_mapping', which names code"):
        copied(adapter, tmp_path)
    assert not (tmp_path / ADAPTER_CONFIG_FILE).exists()
    config.write_text(json.dumps({**SETTINGS, "auto_mapping": None}))  # as peft writes it
    copied(adapter, tmp_path)


def test_a_copy_is_whole(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    copied(adapter, tmp_path / "copy")
    check(tmp_path / "copy")


@pytest.mark.parametrize(
    ("target", "is_adapted"),
    [
        ("model.layers.0.mlp.up_proj", True),
        ("0.mlp.up_proj", True),
        ("up_proj", True),
        ("p_proj", False),
        ("mlp", False),
        ("", False),
    ],
)
def test_a_target_is_the_end_of_a_layers_name(target: str, is_adapted: bool) -> None:
    found = adapter_shapes(BASE, targets=[target], rank=2)
    assert ("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight" in found) == is_adapted


def test_a_file_that_was_cut_is_not_whole(adapter: Path) -> None:
    path = adapter / ADAPTER_FILE
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(WeightFileError, match="is not a whole safetensors file"):
        tensor_shapes(path)
