"""Make a random model of the size of the project's own tiny policy, or of another."""

from __future__ import annotations

from pathlib import Path

from configs import TinyModelConfig
from learner import make_tiny_model, train_tokenizer

CONSONANTS = "bcdfglmnprst"


def make_random_tiny(path: Path, *, seed: int, tiny: TinyModelConfig | None = None) -> None:
    """Write model and tokenizer to a new directory, of the default sizes unless given."""
    words = " ".join(f"{a}{b}{c}" for a in CONSONANTS for b in "aeiou" for c in CONSONANTS)
    tiny = tiny or TinyModelConfig()
    tokenizer = train_tokenizer([words], vocabulary_size=tiny.vocabulary_size)
    make_tiny_model(path, tokenizer=tokenizer, config=tiny, seed=seed)
