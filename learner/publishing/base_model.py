"""Find the base model of a run, and load it to export what was trained."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from configs import Config
from learner.model.lora import add_adapters
from learner.model.policy_model import load_policy
from store import RunLayout

# Places of a base model made for a run: of one without model.path, and of one that clones it.
MADE_BASE_MODELS = ("base/policy", "untrained")


def base_model(layout: RunLayout, config: Config) -> Path:
    """Return the absolute directory of a run's base model, whose weights are version 0.

    Raises FileNotFoundError naming its place if it is not there. Raises StoreError for a stranger's
    run: transformers loads the model, and follows what its files name.
    """
    layout.check_trusted()
    candidates = [layout.root / name for name in MADE_BASE_MODELS]
    if config.model.path:
        candidates = [Path(config.model.path)]
    there = [path for path in candidates if (path / "config.json").is_file()]
    if not there:
        raise FileNotFoundError(
            f"{candidates[0]}, the base model of {layout.root}, is not here; a checkpoint needs "
            "its configuration and tokenizer, and what is not trained. Bring it back"
        )
    return there[0].resolve()  # an adapter's configuration names it


def load_base_model(base: Path, config: Config) -> PreTrainedModel:
    """Return the base model, with new adapters if the run trains some."""
    disable_progress_bar()  # the output of a command is one line
    model = load_policy(
        base, dtype=config.model.dtype, gradient_checkpointing=False, temperature=1.0
    ).causal_lm
    if config.model.lora_rank:
        add_adapters(model, rank=config.model.lora_rank, alpha=config.model.lora_alpha)
    return model
