"""What several test files share."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from actors import PromptForm
from configs import PromptConfig

# The tests are about CPU runs, also on a machine with GPUs. TEST_ON_GPU=1 shows the GPUs to the tests that need one.
if os.environ.get("TEST_ON_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # time decides no test
settings.load_profile("untimed")


class CharacterTokenizer:
    """One token per character; the chat template puts U: before and A: after the message."""

    eos_token_id = 0

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool, return_dict: bool
    ) -> list[int]:
        assert tokenize
        assert not return_dict
        return self.encode(
            "U:" + conversation[0]["content"] + ("A:" if add_generation_prompt else ""), add_special_tokens=False
        )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in token_ids if token)


@pytest.fixture
def form() -> Callable[..., PromptForm]:
    """Makes a PromptForm over characters; keyword arguments change its settings."""

    def make(**changes: object) -> PromptForm:
        settings = {"template": "compact", "history_length": 2, "max_prompt_tokens": 500, **changes}
        return PromptForm(CharacterTokenizer(), PromptConfig(**settings))  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def vision_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny vision model, which nobody changes."""
    from tests.vision_samples import make_vision_model  # here, as torch comes with it

    path = tmp_path_factory.mktemp("vision")
    make_vision_model(path, ["push every box up down left right"], seed=0)
    return path


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real ALFWorld, WebShop and QA data; it is not part of the project. GIGPO_DATA names it."""
    folder = Path(os.environ.get("GIGPO_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no development data at {folder}; set GIGPO_DATA to the folder that has it")
    return folder
