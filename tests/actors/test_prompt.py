"""Test windows, budget and answers, with a tokenizer of one token per character."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.prompting import chat_template
from actors.prompting.action_parser import Answer
from actors.prompting.prompt import PromptForm
from actors.prompting.template import GAP, TEMPLATES, Turn, render, shortened
from envs import Observation

Form = Callable[..., PromptForm]
OBSERVATION = Observation(text="A room.", objective="win", actions=("go east", "take key"))
UNLIMITED = 10**6


def text_of(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def turns(names: str) -> list[Turn]:
    return [Turn(observation=f"saw {name}", action=f"did {name}.") for name in names]


def test_the_prompt_shows_objective_observation_and_every_admissible_action(form: Form) -> None:
    prompt = form().prompt(OBSERVATION, [])
    text = text_of(prompt.token_ids)
    assert text.startswith("U:")
    assert text.endswith("A:")
    assert all(part in text for part in ("win", "A room.", "go east", "take key"))
    assert prompt.actions == ("go east", "take key")
    assert (prompt.n_dropped_turns, prompt.n_dropped_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("history_length", "shown"),
    [(0, []), (1, ["c"]), (2, ["b", "c"]), (9, ["a", "b", "c"]), (-1, ["a", "b", "c"])],
)
def test_only_the_latest_turns_are_shown_oldest_first(
    form: Form, history_length: int, shown: list[str]
) -> None:
    text = text_of(form(history_length=history_length).prompt(OBSERVATION, turns("abc")).token_ids)
    positions = [text.find(f"did {name}.") for name in "abc"]
    assert [name for name, position in zip("abc", positions, strict=True) if position >= 0] == shown
    assert [p for p in positions if p >= 0] == sorted(p for p in positions if p >= 0)


def test_turns_are_numbered_from_the_beginning_of_the_episode(form: Form) -> None:
    made = form(template="alfworld", history_length=2, max_prompt_tokens=UNLIMITED)
    text = text_of(made.prompt(OBSERVATION, turns("abc")).token_ids)
    assert (
        "[Observation 2: 'saw b', Command 2: 'did b.']\n[Observation 3: 'saw c', Command 3: 'did "
        "c.']\n" in text
    )
    assert "this is number 4" in text


def test_a_long_prompt_loses_its_oldest_turns_first(form: Form) -> None:
    history = turns("abc")
    lengths = [len(form(history_length=n).prompt(OBSERVATION, history).token_ids) for n in range(4)]
    assert lengths == [lengths[0] + n * len("> did a.\n") for n in range(4)]
    prompt = form(history_length=-1, max_prompt_tokens=lengths[2] - 1).prompt(OBSERVATION, history)
    assert prompt.token_ids == form(history_length=1).prompt(OBSERVATION, history).token_ids
    assert (prompt.n_dropped_turns, prompt.n_dropped_tokens) == (2, lengths[3] - lengths[1])


def test_then_the_longest_part_of_the_observation_loses_its_middle(form: Form) -> None:
    long = Observation(
        text="begin" + "x" * 400 + "end", objective="win", actions=("go east", "take key")
    )
    prompt = form(max_prompt_tokens=80).prompt(long, turns("ab"))
    # U: win, an empty line's two newlines are the template's; both actions are whole; the text has
    # what is left
    frame = "U:win\n{}\n- go east\n- take key\nA:"
    room = 80 - len(frame) + 2
    shown = room - len(GAP)
    assert text_of(prompt.token_ids) == frame.format(
        long.text[: shown - shown // 2] + GAP + long.text[-(shown // 2) :]
    )
    assert prompt.actions == long.actions
    assert prompt.n_dropped_turns == 2
    assert len(prompt.token_ids) == 80
    assert (
        prompt.n_dropped_tokens
        == len(form(max_prompt_tokens=UNLIMITED).prompt(long, turns("ab")).token_ids) - 80
    )


def test_a_list_of_actions_loses_whole_ones_from_its_middle() -> None:
    observation = Observation(text="short", actions=("aaaa", "bbbb", "cccc", "dddd", "eeee"))
    assert shortened(observation, 12).actions == ("aaaa", "bbbb", "eeee")
    assert shortened(observation, 12).text == "short"
    assert shortened(observation, 19).actions == ("aaaa", "bbbb", "dddd", "eeee")
    assert shortened(observation, 3).actions == ()
    assert shortened(Observation(text="short"), 3).actions is None


def test_a_template_that_is_longer_than_the_budget_keeps_both_ends_of_the_chat(form: Form) -> None:
    prompt = form(template="alfworld", max_prompt_tokens=41).prompt(OBSERVATION, [])
    text = text_of(prompt.token_ids)
    assert len(text) == 41
    assert text.startswith("U:You are an expert")
    assert text.endswith("</action>.A:")


words = st.text("ab \n'{}", max_size=120)
few = st.sampled_from(["", "a", "b", "a b"])  # so that messages come again


# `form` has no state
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    observation=st.builds(
        Observation,
        text=words,
        objective=words,
        actions=st.none() | st.lists(words, max_size=6).map(tuple),
    ),
    history=st.lists(st.builds(Turn, observation=words, action=words), max_size=6),
    history_length=st.integers(-1, 7),
    budget=st.integers(10, 600),
    template=st.sampled_from(sorted(TEMPLATES)),
)
def test_any_prompt_fits_with_both_its_ends_and_what_is_missing_is_counted(
    form: Form,
    observation: Observation,
    history: list[Turn],
    history_length: int,
    budget: int,
    template: str,
) -> None:
    def made(budget: int, history_length: int) -> PromptForm:
        return form(template=template, history_length=history_length, max_prompt_tokens=budget)

    asked = len(history) if history_length < 0 else min(history_length, len(history))
    prompt = made(budget, history_length).prompt(observation, history)
    whole = made(UNLIMITED, history_length).prompt(observation, history)
    text = text_of(prompt.token_ids)
    assert len(text) <= budget
    assert text.startswith("U:")
    assert text.endswith("A:")
    assert prompt.n_dropped_tokens == len(whole.token_ids) - len(text) >= 0
    assert (prompt.n_dropped_tokens > 0) == (prompt.token_ids != whole.token_ids)
    assert 0 <= prompt.n_dropped_turns <= asked
    kept = asked - prompt.n_dropped_turns
    if kept:
        assert prompt.token_ids == made(UNLIMITED, kept).prompt(observation, history).token_ids
    if prompt.n_dropped_turns and kept:
        assert len(made(UNLIMITED, kept + 1).prompt(observation, history).token_ids) > budget


@pytest.mark.parametrize("template", sorted(TEMPLATES))
@pytest.mark.parametrize("parser", ["tags", "upstream", "text"])
def test_the_scripted_answer_parses_back_to_its_action(
    form: Form, template: str, parser: str
) -> None:
    if parser == "upstream" and TEMPLATES[template].upstream is None:
        with pytest.raises(
            ValueError, match=f"'upstream' has no rule for prompt.template='{template}'"
        ):
            form(template=template, parser=parser)
        return
    made = form(template=template, parser=parser)
    action = {"search": "<search>a key</search>", "sokoban": "left", "sokoban_image": "left"}.get(
        template, "take key"
    )
    ids = made.encode_answer(action)
    assert ids[-1] == made.tokenizer.eos_token_id
    assert made.parse(ids) == Answer(action=action, well_formed=True)


@pytest.mark.parametrize("parser", ["tags", "text"])
def test_the_token_that_ends_a_reply_is_no_part_of_an_action_without_tags(
    form: Form, parser: str
) -> None:
    made = form(parser=parser)
    token_ids = made.tokenizer.encode("go east", add_special_tokens=False)
    assert made.parse([*token_ids, made.tokenizer.eos_token_id]) == Answer(
        action="go east", well_formed=parser == "text"
    )


def test_braces_in_game_text_are_text() -> None:
    text = render(
        TEMPLATES["compact"], Observation(text="{step} {x}", objective="{y}"), history=[], kept=0
    )
    assert "{step} {x}" in text
    assert "{y}" in text


def test_an_unknown_template_is_refused(form: Form) -> None:
    with pytest.raises(ValueError, match=r"nonsense.*'compact'"):
        form(template="nonsense")


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50
)
@given(
    visits=st.lists(
        st.tuples(
            st.builds(Observation, text=few, actions=st.none() | st.tuples(few)),
            st.lists(st.builds(Turn, observation=few, action=few), max_size=3),
        ),
        min_size=1,
        max_size=20,
    ),
    budget=st.sampled_from([8, UNLIMITED]),
    kept_characters=st.sampled_from([0, 30, UNLIMITED]),
)
def test_kept_tokens_are_those_that_a_new_form_makes(
    form: Form,
    visits: list[tuple[Observation, list[Turn]]],
    budget: int,
    kept_characters: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template, "KEPT_CHARACTERS", kept_characters)
        keeping = form(max_prompt_tokens=budget)
        for observation, history in visits:
            expected = form(max_prompt_tokens=budget).prompt(observation, history)
            assert keeping.known_prompt(observation, history) in (None, expected)
            assert keeping.prompt(observation, history) == expected
            if kept_characters == UNLIMITED and not expected.n_dropped_tokens:
                assert keeping.known_prompt(observation, history) == expected
