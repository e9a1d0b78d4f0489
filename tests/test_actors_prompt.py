"""Templates, history and parsing, with a tokenizer whose tokens are characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from actors import TEMPLATES, Answer, PromptForm, Turn, parse_action, render
from envs import Observation

Form = Callable[..., PromptForm]
OBSERVATION = Observation(text="A room.", objective="win", actions=("go east", "take key"))


def text_of(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def test_the_prompt_shows_objective_observation_and_every_admissible_action(form: Form) -> None:
    prompt = form().prompt(OBSERVATION, [])
    text = text_of(prompt.token_ids)
    assert text.startswith("U:")
    assert text.endswith("A:")
    assert all(part in text for part in ("win", "A room.", "go east", "take key"))
    assert prompt.actions == ("go east", "take key")


@pytest.mark.parametrize(("history_length", "shown"), [(0, []), (1, ["c"]), (2, ["b", "c"]), (9, ["a", "b", "c"])])
def test_only_the_latest_turns_are_shown_oldest_first(form: Form, history_length: int, shown: list[str]) -> None:
    history = [Turn(observation=f"saw {name}", action=f"did {name}.") for name in "abc"]
    text = text_of(form(history_length=history_length).prompt(OBSERVATION, history).token_ids)
    positions = [text.find(f"did {name}.") for name in "abc"]
    assert [name for name, position in zip("abc", positions, strict=True) if position >= 0] == shown
    assert [p for p in positions if p >= 0] == sorted(p for p in positions if p >= 0)


def test_a_long_prompt_loses_its_oldest_turns_first_and_then_its_beginning(form: Form) -> None:
    history = [Turn(observation="x" * 50, action=f"did {name}" + "y" * 50) for name in "abc"]
    none_kept = len(form(history_length=0).prompt(OBSERVATION, history).token_ids)
    one_kept = len(form(history_length=1).prompt(OBSERVATION, history).token_ids)
    text = text_of(form(history_length=3, max_prompt_tokens=one_kept).prompt(OBSERVATION, history).token_ids)
    assert "did c" in text
    assert "did b" not in text
    cut = form(history_length=3, max_prompt_tokens=none_kept - 5).prompt(OBSERVATION, history).token_ids
    assert len(cut) == none_kept - 5
    assert text_of(cut).endswith("A:")


@pytest.mark.parametrize(
    ("text", "thinks", "answer"),
    [
        ("<think>so</think><action> Go East </action>", True, Answer(action="go east", well_formed=True)),
        ("<action>go east</action>", True, Answer(action="go east", well_formed=False)),
        ("<action>go east</action>", False, Answer(action="go east", well_formed=True)),
        ("<action>a</action><action>b</action>", False, Answer(action="a", well_formed=True)),
        ("<action>a<action>b</action>", False, Answer(action="a<action>b", well_formed=True)),
        ("</action>x<action>b", False, Answer(action="</action>x<action>b", well_formed=False)),
        ("z" * 40, False, Answer(action="z" * 30, well_formed=False)),
        ("", False, Answer(action="", well_formed=False)),
    ],
)
def test_parsing(text: str, thinks: bool, answer: Answer) -> None:
    assert parse_action(text, thinks=thinks) == answer


@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_the_scripted_answer_parses_back_to_its_action(form: Form, template: str) -> None:
    made = form(template=template)
    ids = made.encode_answer("take key")
    assert ids[-1] == made.tokenizer.eos_token_id
    assert made.parse(ids) == Answer(action="take key", well_formed=True)


def test_braces_in_game_text_are_text() -> None:
    text = render(TEMPLATES["compact"], Observation(text="{step} {x}", objective="{y}"), [], kept=0)
    assert "{step} {x}" in text
    assert "{y}" in text


def test_an_unknown_template_is_refused(form: Form) -> None:
    with pytest.raises(ValueError, match="nonsense.*compact"):
        form(template="nonsense")
