"""A dense index for `python -P -m envs.search.server`: E5 embeddings of a corpus, compared exactly.

    export PYTHONPATH=$PWD/docs/examples
    python -m e5_index corpus.jsonl   # once: writes corpus.jsonl.e5.npy beside it
    python -P -m envs.search.server --corpus corpus.jsonl --index e5_index:make

E5_MODEL is a Hugging Face name or directory, intfloat/e5-base-v2 unless set. Embedding runs on a
GPU where there is one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

from envs.search.corpus import read_passages

BATCH, MAX_TOKENS = 64, 256


class E5:
    def __init__(self) -> None:
        name = os.environ.get("E5_MODEL", "intfloat/e5-base-v2")
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._tokenizer, self._model = (
            AutoTokenizer.from_pretrained(name),
            AutoModel.from_pretrained(name).to(self._device).eval(),
        )

    @torch.inference_mode()
    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Return the mean of each text's last states, as [n, H] with rows of length 1.

        E5 wants "query: " or "passage: " before a text.
        """
        parts = []
        for begin in range(0, len(texts), BATCH):
            batch = list(texts[begin : begin + BATCH])
            tokens = self._tokenizer(
                batch, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
            )
            tokens = tokens.to(self._device)
            states, mask = (
                self._model(**tokens).last_hidden_state,
                tokens["attention_mask"][..., None],
            )
            means = (states * mask).sum(1) / mask.sum(1)
            parts.append(torch.nn.functional.normalize(means, dim=1).float().cpu().numpy())
        return np.concatenate(parts)


def make(corpus: Path) -> Callable[[Sequence[str], int], list[list[tuple[str, float]]]]:
    """Return the function that searches. The server calls `make` once."""
    ids = [passage.id for passage in read_passages(corpus)]
    passages = np.load(embeddings(corpus), mmap_mode="r")
    if len(passages) != len(ids):
        raise ValueError(
            f"{embeddings(corpus)} has {len(passages)} rows, {corpus} {len(ids)} passages; embed "
            "the corpus again"
        )
    e5 = E5()

    def search(queries: Sequence[str], topk: int) -> list[list[tuple[str, float]]]:
        scores = e5.embed([f"query: {query}" for query in queries]) @ passages.T
        best = np.argsort(-scores, axis=1, kind="stable")[:, :topk]
        found = []
        for rows, own in zip(best, scores, strict=True):
            found.append([(ids[row], float(own[row])) for row in rows])
        return found

    return search


def embeddings(corpus: Path) -> Path:
    return corpus.with_name(f"{corpus.name}.e5.npy")


def main() -> None:
    corpus = Path(sys.argv[1])
    texts = [f"passage: {passage.contents}" for passage in read_passages(corpus)]
    np.save(embeddings(corpus), E5().embed(texts))
    print(f"{embeddings(corpus)}: {len(texts):,} passages")


if __name__ == "__main__":
    main()
