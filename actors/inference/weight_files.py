"""Files of weights: names and shapes, from the safetensors headers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

TIED_OUTPUT_LAYER = "lm_head.weight"
RECEIVED = "(received)"  # in place of a path: weights that the learner has sent


class WeightFileError(ValueError):
    """These weights were refused before the engine was touched; it goes on with the version it
    has.
    """


def weight_files(path: Path) -> list[Path]:
    """The safetensors files at `path`, itself one or a directory of them."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise WeightFileError(
            f"no weights at {path}: give a .safetensors file, or a directory that holds some"
        )
    return files


def tensor_shapes(path: Path) -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {}
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt") as tensors:
                shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise WeightFileError(
                f"{file} is not a whole safetensors file ({error}); publish it again"
            ) from error
    return shapes


def check_shapes(path: Path, *, expected: Mapping[str, list[int]]) -> None:
    """Every name and shape must agree: for a tensor that is missing vLLM keeps the old values,
    without an error.
    """
    check_fit(tensor_shapes(path), expected=expected, source=str(path))


def check_fit(
    shapes: Mapping[str, list[int]], *, expected: Mapping[str, list[int]], source: str
) -> None:
    """As `check_shapes`, of tensors from any `source`."""
    found = dict(shapes)
    if TIED_OUTPUT_LAYER not in expected:
        found.pop(TIED_OUTPUT_LAYER, None)  # some writers store it a second time; vLLM skips it
    wrong = sorted(
        name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)
    )
    if wrong:
        name = wrong[0]
        raise WeightFileError(
            f"{source} does not fit the model being served: {len(wrong)} tensors differ, the first "
            f"is {name}, of shape "
            f"{found.get(name, 'missing')} here and {expected.get(name, 'missing')} there. "
            f"Publish all tensors of the base model under their names"
        )
