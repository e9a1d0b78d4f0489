"""Test shipped templates, template files, and the refusal of broken ones."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import configs
from actors.prompting.template import (
    FOLDER,
    TEMPLATES,
    Template,
    Turn,
    find_template,
    render,
    render_next,
)
from actors.prompting.tokenizer_corpus import sample_chats
from configs import Config, ConfigError, EnvConfig, PromptConfig
from configs import check as check_config
from envs import Observation

ROOT = Path(__file__).resolve().parents[2]
OWN = yaml.safe_load((FOLDER / "direct.yaml").read_text())
SEEN = Observation(text="A room.", objective="win", actions=("go east",))


def written(path: Path, **changes: object) -> str:
    values = {key: value for key, value in {**OWN, **changes}.items() if value is not None}
    path.write_text(yaml.safe_dump(values))
    return str(path)


def test_the_config_knows_every_template_by_name() -> None:
    for name in TEMPLATES:
        check_config(Config(prompt=PromptConfig(template=name)))
    with pytest.raises(ConfigError) as caught:
        check_config(Config(prompt=PromptConfig(template="thonk")))
    assert all(repr(name) in str(caught.value) for name in TEMPLATES)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_each_template_shows_all_of_an_observation_in_every_form(name: str) -> None:
    template = TEMPLATES[name]
    shown: tuple[str, ...] = ("A room.", "go east")
    if name in ("search", "sokoban"):
        shown = ("A room.",)
    elif name == "sokoban_image":  # what there is to see is the image
        shown = ()
    assert all(part in render(template, SEEN, history=[], kept=0) for part in (*shown, "win"))
    assert all(part in render_next(template, SEEN, step=2) for part in shown)


def test_a_template_of_ones_own_is_a_file(tmp_path: Path) -> None:
    path = written(
        tmp_path / "own.yaml",
        first="I see {observation} {{}}",
        tags=["move"],
        answer="<move>{action}</move>",
    )
    template = find_template(path)
    assert render(template, SEEN, history=[], kept=0) == "I see A room. {}"
    assert template.tags == ("move",)
    assert template.upstream is None
    check_config(Config(prompt=PromptConfig(template=path)))


def documented(number: int, path: Path) -> Template:
    """Read the first or second template of docs/prompts.md."""
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "prompts.md").read_text(), re.DOTALL)
    path.write_text(blocks[number])
    return find_template(str(path))


TURNS = [Turn(observation=f"room {n}", action=f"go {n}") for n in (1, 2, 3)]


def test_steps_taken_turns_shown_and_separators(tmp_path: Path) -> None:
    template = documented(0, tmp_path / "own.yaml")
    seen = Observation(text="room 4", objective="win", actions=("look", "go 4"))
    assert render(template, seen, history=TURNS, kept=2) == (
        "win\nYou took 3 step(s). The last 2:\n"
        "[Observation 2: 'room 2', Action 2: 'go 2']\n[Observation 3: 'room 3', Action 3: 'go 3']\n"
        "You are at step 4: room 4\nYou can: ['look'\n 'go 4']"
    )


def test_a_turn_may_show_the_result_of_its_action(tmp_path: Path) -> None:
    """Search three times; the third reply is neither a search nor an answer and finds nothing."""
    template = documented(1, tmp_path / "own.yaml")
    turns = [
        Turn(observation="", action="<search>a</search>"),
        Turn(observation="<information>A</information>", action="<search>b</search>"),
        Turn(observation="<information>B</information>", action="what?"),
    ]
    seen = Observation(text="", objective="Who?")
    assert render(template, seen, history=turns, kept=2) == (
        "Who?\nYou took 3 step(s):\nStep 2:<search>b</search> "
        "\n<information>B</information>\n\nStep 3:what? "
    )
    assert render(template, replace(seen, text="C"), history=turns[:1], kept=1).endswith(
        "Step 1:<search>a</search> \nC\n"
    )
    assert render(template, seen, history=[], kept=0) == "Who?"


def test_a_message_may_say_how_many_steps_were_taken_in_every_form(tmp_path: Path) -> None:
    words = "{taken} of {step}"
    template = find_template(
        written(
            tmp_path / "own.yaml", first=words + ", {shown} shown", next=words, turn_separator="{{"
        )
    )
    assert render(template, SEEN, history=TURNS, kept=0) == "3 of 4, 0 shown"
    assert render_next(template, SEEN, step=2) == "1 of 2"
    assert template.turn_separator == "{"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"turn_separator": "{step}"}, ["turn_separator has {step}", "it has none"]),
        ({"action_separator": 3}, ["action_separator must be text, not 3"]),
        ({"next": "{shown}"}, ["next has {shown}"]),
        ({"next": None}, ["lacks next", "direct.yaml"]),
        ({"nxt": "a"}, ["has nxt", "none of", "next"]),
        ({"first": "{observed}"}, ["first has {observed}", "observation"]),
        ({"turn": "{history}"}, ["turn has {history}"]),
        ({"first": "a { b"}, ["first", "{{"]),
        ({"first": 3}, ["first must be text, not 3"]),
        ({"tags": "action"}, ["tags must be a list"]),
        ({"thinks": "maybe"}, ["thinks true or false"]),
        ({"upstream": {"words": []}}, ["upstream must have exactly", "refuse_chinese"]),
    ],
)
def test_a_mistake_in_it_is_one_line_that_names_file_and_key(
    tmp_path: Path, changes: dict[str, object], words: list[str]
) -> None:
    path = written(tmp_path / "own.yaml", **changes)
    with pytest.raises(ValueError, match="own.yaml") as caught:
        find_template(path)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    for text in ("just words", "a: [", ""):
        (tmp_path / "own.yaml").write_text(text)
        with pytest.raises(ValueError, match="own.yaml"):
            find_template(str(tmp_path / "own.yaml"))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("prompt.style=caht", ["prompt.style='caht'", "did you mean 'chat'"]),
        ("prompt.parser=tag", ["prompt.parser='tag'", "did you mean 'tags'"]),
        ("prompt.template=own.yaml", ["'own.yaml'", "nor a file"]),
        ("prompt.history_length=-2", ["-2", "-1 for all"]),
        ("prompt.stop=x", ["prompt.stop"]),
        ("prompt.stop=['']", ["empty text"]),
        ("prompt.max_prompt_tokens=0", ["above 0"]),
    ],
)
def test_a_prompt_setting_out_of_its_range_is_refused_by_name(
    tmp_path: Path, override: str, words: list[str]
) -> None:
    (tmp_path / "c.yaml").write_text("{}\n")
    with pytest.raises(ConfigError) as caught:
        configs.load(tmp_path / "c.yaml", [override])
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_history_length_that_would_do_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("prompt: {style: chat, history_length: 4}\n")
    with pytest.raises(ConfigError, match="history_length=4 does nothing"):
        configs.load(tmp_path / "c.yaml")
    loaded = configs.load(
        tmp_path / "c.yaml",
        ["prompt.history_length=-1", "prompt.stop=[</action>]", "prompt.thinking=false"],
    )
    assert loaded.prompt.stop == ["</action>"]
    assert loaded.prompt.thinking is False
    assert configs.from_yaml(configs.as_yaml(loaded)) == loaded


@pytest.mark.parametrize("style", ["window", "chat"])
def test_texts_to_make_a_tokenizer_from_are_messages_with_their_answers(style: str) -> None:
    config = Config(
        env=EnvConfig(name="key_room", options={}, max_steps=4),
        prompt=PromptConfig(template="compact", style=style, history_length=-1),
    )
    texts = list(sample_chats(config))
    assert all(text.endswith("</action>") for text in texts)
    begun = [text for text in texts if text.startswith("unlock the door.\n")]
    # of 40 games; later messages of a chat do not repeat the goal
    assert len(begun) == (40 if style == "chat" else len(texts))
    assert any(text.count("\n> ") == 3 for text in texts) == (style == "window")


WANDERING = """
import os
from envs import Observation
from envs.key_room import KeyRoomEnv
class Wandering(KeyRoomEnv):
    async def reset(self, task):
        os.chdir("/")
        return KeyRoomEnv.reset(self, task)
    async def step(self, action): return KeyRoomEnv.step(self, action)
"""


def test_an_environment_that_is_sampled_leads_the_driver_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandering_world.py").write_text(WANDERING)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    config = replace(Config(), env=EnvConfig(name="wandering_world:Wandering"))
    assert sample_chats(config) and Path.cwd() == tmp_path


def aliases() -> str:
    """Write ten aliases in ten aliases, eight times over: 400 bytes for a hundred million values."""
    parts = ["&a [x,x,x,x,x,x,x,x,x,x]"]
    parts += [
        f"&{new} [" + ",".join([f"*{old}"] * 10) + "]"
        for old, new in zip("abcdefg", "bcdefgh", strict=True)
    ]
    return f"first: [{', '.join(parts)}]"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (aliases(), "it has an anchor (&) of a list"),
        ("first: " + "[" * 5000, "nested more than 8 deep"),
        ("first: [" + "x," * 10_000 + "]", "more than 10,000 parts"),
        ("first: '" + "x" * 2**20 + "'", "more than 1,048,576 characters"),
        ("first: " + "1:" * 100 + "1", "a number or a date of 201 characters"),
        ("first: !!timestamp x", "it has the tag tag:yaml.org,2002:timestamp"),
        ("first: 2001-99-99", "month must be in 1..12"),
        ("first: \x07", "special characters are not allowed"),
        ("k" * 90 + ": 1\n" + "j" * 90 + ": 2", "lacks action"),
    ],
)
def test_a_strangers_template_is_refused_in_bounded_work(
    tmp_path: Path, text: str, why: str
) -> None:
    path = tmp_path / "strange.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(why)) as caught:
        find_template(str(path))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(path))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"first": "{step:>2000000000}"}, "first has a format behind `step`"),
        ({"later": "{step:{taken}}"}, "later has a format behind `step`"),
        ({"turn": "{action!r}"}, "turn has a format behind `action`"),
        ({"next": "{step.__class__}"}, "next has {step.__class__}, which is none"),
        ({"next": "{" + "x" * 10_000 + "}"}, "which is none"),
        ({"first": ["x" * 10_000]}, "first must be text, not a list"),
        ({"tags": [1]}, "tags must be a list"),
        (
            {"upstream": {"refuse_chinese": True, "unparsed_characters": "x", "words": 5}},
            "a whole number",
        ),
    ],
)
def test_a_value_that_makes_a_long_text_is_refused(
    tmp_path: Path, changes: dict[str, object], why: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(why)) as caught:
        find_template(written(tmp_path / "strange.yaml", **changes))
    assert len(str(caught.value)) < 500
