"""Test that the cause of an error is found, also in another process's error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import ray
from ray.exceptions import ActorDiedError

import configs
from actors.prompting.prompt import PromptForm
from configs import PromptConfig
from coordinator import Coordinator
from driver.cluster import ray_cluster
from driver.errors import DIED, ComponentFailed, cause_of, describe_cause
from envs import log_hint
from store import Catalog, RunLayout
from tests.support.supervisor_samples import as_ray_passes_it_on, of_init, raised_by


class UntalkativeTokenizer:
    """Stand for the tokenizer of a base model, which has no chat template."""

    eos_token_id = 0

    def apply_chat_template(self, *args: object, **options: object) -> list[int]:
        raise ValueError("tokenizer.chat_template is not set")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [1]

    def decode(self, token_ids: object, *, skip_special_tokens: bool) -> str:
        return ""

    def get_vocab(self) -> dict[str, int]:
        return {}


def bad_template(path: Path) -> Callable[[], object]:
    path.write_text("{system: hello}")
    return lambda: PromptForm(UntalkativeTokenizer(), PromptConfig(template=str(path)))


def locked(path: Path) -> Callable[[], object]:
    config = configs.from_yaml(f"{{run_dir: {path}, env: {{name: key_room}}}}")
    layout = RunLayout.create(path, config_yaml=configs.as_yaml(config), storage_uri="")
    owner = Catalog.open(layout)  # kept open by the closure

    def open_again() -> object:
        assert owner
        return Coordinator(config, learns=True)

    return open_again


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (
            lambda path: lambda: PromptForm(UntalkativeTokenizer(), PromptConfig()),
            ["ValueError: ", "chat template", "model"],
        ),
        (lambda path: bad_template(path / "mine.yaml"), ["mine.yaml"]),
        (lambda path: locked(path / "run"), ["LockedError: "]),
        (
            lambda path: (
                lambda: Coordinator(configs.from_yaml(f"{{run_dir: {path}/none}}"), learns=True)
            ),
            ["Error: ", "none"],
        ),
    ],
    ids=["chat template", "template file", "locked catalog", "no run"],
)
def test_what_an_actor_refuses_at_its_making_is_the_cause(
    tmp_path: Path, refusal: Callable[[Path], Callable[[], object]], words: list[str]
) -> None:
    error = raised_by(refusal(tmp_path))
    line = describe_cause(of_init(error))
    assert line == " ".join(f"{type(error).__name__}: {error}".split())
    assert all(word in line for word in words), line
    assert line == describe_cause(as_ray_passes_it_on(error))


def test_a_cause_is_found_through_processes_and_groups_and_kept_whole() -> None:
    cause = ValueError("line one\n  line two: use y")
    wrapped = as_ray_passes_it_on(ExceptionGroup("loops", [as_ray_passes_it_on(cause), KeyError()]))
    assert cause_of(wrapped) is cause
    assert (
        describe_cause(as_ray_passes_it_on(ActorDiedError()))
        == describe_cause(ActorDiedError())
        == DIED
    )
    assert describe_cause(wrapped) == "ValueError: line one line two: use y"
    long = describe_cause(ValueError("start " + "x" * 5000 + " remedy"))
    assert long.startswith("ValueError: start") and long.endswith("remedy") and len(long) < 1100


def test_a_log_that_is_not_there_is_not_named(tmp_path: Path) -> None:
    assert log_hint(tmp_path / "a.log") == ""
    (tmp_path / "a.log").write_text("")
    assert log_hint(tmp_path / "a.log") == f"; log: {tmp_path / 'a.log'}"


def test_a_ray_that_does_not_start_in_time_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine. Ray's own error was shown with a page of its traceback."""

    def start(**settings: object) -> None:
        raise Exception("The current node timed out during startup. This could happen because ...")

    monkeypatch.setattr(ray, "init", start)
    with (
        pytest.raises(ComponentFailed, match="same command again"),
        ray_cluster(str(tmp_path), processes=1),
    ):
        pass
