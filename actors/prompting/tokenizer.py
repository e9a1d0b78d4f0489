"""The tokenizer of a model's directory, with as much of transformers as the process has a use
for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import cast

from actors.prompting.chat_template import Tokenizer
from configs import loaded


def load_tokenizer(model_path: str, *, with_torch: bool) -> Tokenizer:
    """Without torch, for a process that computes nothing with a model, it takes a third of the
    time.

    transformers is then loaded as where torch is not installed, with its tokenizers and
    configurations alone, and stays so in this process.
    """
    with nullcontext() if with_torch else _torch_hidden():
        from transformers import AutoTokenizer  # here: the driver and the coordinator never need it

        return cast(
            Tokenizer,
            loaded(
                "tokenizer",
                model_path,
                lambda: AutoTokenizer.from_pretrained(model_path, trust_remote_code=False),
            ),
        )


@contextmanager
def _torch_hidden() -> Iterator[None]:
    if "torch" in sys.modules:  # there is nothing to save
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # Python's way to say that a module is not to be found
    try:
        yield
    finally:
        del sys.modules["torch"]
