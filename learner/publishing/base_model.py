"""Where the model is that a run began with, whose weights are version 0."""

from __future__ import annotations

from pathlib import Path

from configs import Config
from store import RunLayout, check_trusted

# of a run with no model.path; of the run that clones that policy
MADE_HERE = ("base/policy", "untrained")


def base_model(layout: RunLayout, config: Config) -> Path:
    """Return a Hugging Face directory. Raises FileNotFoundError if it is not there, in a line that
    says where it should be.

    Raises StoreError for a model outside of a stranger's run: its files would be taken for the
    run's and handed on.
    """
    if config.model.path:
        check_trusted(layout.root)
    candidates = (
        [Path(config.model.path)]
        if config.model.path
        else [layout.root / name for name in MADE_HERE]
    )
    there = [path for path in candidates if (path / "config.json").is_file()]
    if not there:
        raise FileNotFoundError(
            f"{candidates[0]}, the base model of {layout.root}, is not here; a checkpoint needs "
            "its configuration and "
            "tokenizer, and what is not trained. Bring it back"
        )
    return there[0]
