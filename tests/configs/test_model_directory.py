"""Check that no description in a model directory names a file, another class or another model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from configs import ConfigError, check_model_directory, files_of_index, model_type
from configs import model_directory as checked

USUAL = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen2_5_VLProcessor",
    "size": {"shortest_edge": 3136, "longest_edge": 12845056},
    "image_mean": [0.48, 0.46, 0.41],
    "data_format": "channels_first",
    "device": None,
    "do_resize": True,
}


def _written(directory: Path, name: str, content: object) -> Path:
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen2_vl"}))
    (directory / name).write_text(json.dumps(content))
    return directory


def test_the_image_processor_of_a_qwen2_vl_model_is_accepted(tmp_path: Path) -> None:
    check_model_directory(_written(tmp_path, "preprocessor_config.json", USUAL))
    check_model_directory(_written(tmp_path, "processor_config.json", {"image_processor": USUAL}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image_processor_type": "OneFormerImageProcessor"}, "not of a Qwen2-VL model"),
        ({"processor_class": "DiaProcessor"}, "not of a Qwen2-VL model"),
        ({"image_processor_type": ["OneFormerImageProcessor"]}, "not of a Qwen2-VL model"),
        ({"repo_path": "/"}, "has the key 'repo_path'"),
        ({"class_info_file": "private.json"}, "has the key 'class_info_file'"),
        ({"size": {"path": 0}}, "has the key 'path'"),
        ({"feature_extractor_type": "OneFormerFeatureExtractor"}, "'feature_extractor_type'"),
        ({"auto_map": {"AutoImageProcessor": "code.New"}}, "has the key 'AutoImageProcessor'"),
    ],
)
def test_an_image_processor_names_no_file_and_no_other_class(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    content = {**USUAL, **changes}
    for name, written in {
        "preprocessor_config.json": content,
        "processor_config.json": {"image_processor": content},
    }.items():
        with pytest.raises(ConfigError, match=words):
            check_model_directory(_written(tmp_path, name, written))
        (tmp_path / name).unlink()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        # vLLM would load the verifier instead of this model
        (
            {"speculators_config": {"verifier": {"name_or_path": "/elsewhere"}}},
            "has the key 'speculators_config'",
        ),
        ({"speculators_model_type": "eagle3"}, "has the key 'speculators_model_type'"),
        ({"architectures": ["UltravoxModel"]}, "must be LlamaForCausalLM"),
        ({"architectures": "LlamaForCausalLM"}, "must be LlamaForCausalLM"),
        ({"architectures": [["LlamaForCausalLM"]]}, "must be LlamaForCausalLM"),
    ],
)
def test_the_engine_is_led_to_no_other_model(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    usual = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(usual))
    check_model_directory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**usual, **changes}))
    with pytest.raises(ConfigError, match=words):
        check_model_directory(tmp_path)


NAMES = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("preprocessor_config.json", "generation_config.json", "model.safetensors"),
    *("model.safetensors.index.json", "pytorch_model.bin.index.json"),
)


@pytest.mark.parametrize("name", NAMES)
def test_a_fifo_in_a_model_directory_is_refused(tmp_path: Path, name: str) -> None:
    """Refuse every file that would block whoever reads it."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match="no regular file"):
        check_model_directory(tmp_path)


def test_single_descriptions_are_read_within_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read neither a FIFO nor a file beyond the bound, and follow links to files."""
    index = tmp_path / "model.safetensors.index.json"
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="no regular file"):
        model_type(str(tmp_path))
    index.symlink_to(tmp_path / "config.json")
    with pytest.raises(ValueError, match="no regular file"):
        files_of_index(index)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "weight_map": {}}')
    assert files_of_index(index) == set()
    monkeypatch.setattr(checked, "MAX_DESCRIPTION_BYTES", 8)
    with pytest.raises(ConfigError, match="more than 8 bytes"):
        model_type(str(tmp_path))


def test_descriptions_have_a_bounded_number_of_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count the values before Python's objects are made of them, in each kind of file."""
    monkeypatch.setattr(checked, "MAX_DESCRIPTION_VALUES", 4)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    check_model_directory(tmp_path)
    many = json.dumps({"weight_map": {str(number): "a.safetensors" for number in range(9)}})
    for name in ("model.safetensors.index.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_text(many)
        with pytest.raises(ConfigError, match=f"{name} .*more than 4 values"):
            check_model_directory(tmp_path)
        (tmp_path / name).unlink()


def test_many_weight_indexes_are_not_read(tmp_path: Path) -> None:
    """The attack: a thousand links to one large index took a quarter of an hour."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    first = tmp_path / "model.safetensors.index.json"
    first.write_text('{"weight_map": {}}')
    for number in range(8):
        check_model_directory(tmp_path)
        os.link(first, tmp_path / f"{number}.bin.index.json")
    with pytest.raises(ConfigError, match="has 9 weight indexes, more than 8; remove those of"):
        check_model_directory(tmp_path)


def test_neither_endless_links_nor_endless_files_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: 250,000 links, each through 38 others of 1,600 names, kept a dry run for hours."""
    model, beside = tmp_path / "model", tmp_path / "beside"
    for directory in (model, beside, beside / "x"):
        directory.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen2"}')
    (beside / "weights").write_text("")
    (model / "model.safetensors").symlink_to("../beside/x/../weights")
    (model / "broken").symlink_to("nothing")
    check_model_directory(model)
    (beside / "far").symlink_to("x/../" * 200 + "weights")
    (model / "notes.txt").symlink_to("../beside/far")
    with pytest.raises(ConfigError, match="notes.txt leads through more than 256 names; put"):
        check_model_directory(model)
    (model / "notes.txt").unlink()
    (model / "round").symlink_to("round")
    with pytest.raises(ConfigError, match="round leads through more than 256 names"):
        check_model_directory(model)
    (model / "round").unlink()
    (beside / "way").symlink_to("x/../" * 200 + "../model")
    with pytest.raises(ConfigError, match="way leads through more than 256 names; give the dir"):
        check_model_directory(beside / "way")
    monkeypatch.setattr(checked, "MAX_FILES", 2)
    with pytest.raises(ConfigError, match="has more than 2 files; give a directory of the model"):
        check_model_directory(model)
