"""Test each parser rule; "upstream" follows the description of the paper's code."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from actors.prompting import action_parser
from actors.prompting.action_parser import Answer, parse_action
from actors.prompting.template import TEMPLATES

COMPACT, THINK = TEMPLATES["compact"], TEMPLATES["think"]
LONG = "0123456789" * 4 + "End"


def parsed(text: str, template: str, parser: str, opening: str = "") -> Answer:
    return parse_action(text, template=TEMPLATES[template], parser=parser, opening=opening)


@pytest.mark.parametrize(
    ("text", "thinks", "action", "well_formed"),
    [
        ("<think>so</think><action> Go East </action>", True, "go east", True),
        ("<action>go east</action>", True, "go east", False),
        ("<action>go east</action>", False, "go east", True),
        ("<action>a</action><action>b</action>", False, "a", True),
        ("<action>a<action>b</action>", False, "a<action>b", True),
        ("</action>x<action>b</action>", False, "b", True),
        ("</action>x<action>b", False, "</action>x<action>b", False),
        ("z" * 40, False, "z" * 30, False),
        ("", False, "", False),
    ],
)
def test_tags(text: str, thinks: bool, action: str, well_formed: bool) -> None:
    answer = parse_action(text, template=THINK if thinks else COMPACT, parser="tags", opening="")
    assert answer == Answer(action=action, well_formed=well_formed)


def test_a_thought_that_the_chat_template_has_begun_counts() -> None:
    assert parsed("so</think><action>go</action>", "think", "tags", opening="<think>\n").well_formed
    assert not parsed("so</think><action>go</action>", "think", "tags").well_formed
    assert not parsed(
        "so</think><action>go</action>", "think", "upstream", opening="<think>\n"
    ).well_formed
    assert parsed("so", "think", "tags", opening="<think>\n") == Answer(
        action="so", well_formed=False
    )


def test_a_template_may_have_another_tag() -> None:
    answer = parse_action(
        "<move>Up</move>", template=replace(COMPACT, tags=("move",)), parser="tags", opening=""
    )
    assert answer == Answer(action="up", well_formed=True)


@pytest.mark.parametrize(
    ("text", "template", "action", "well_formed"),
    [
        ("<think>a</think><action> Go East </action>", "alfworld", "go east", True),
        ("<think>a</think><action></action>", "alfworld", "", True),
        ("<action>go</action> <think></think>", "alfworld", "go", True),
        # the first of each, wherever it is
        ("</action><think></think><action>go</action>", "alfworld", "", True),
        ("<action>go</action>", "alfworld", "go", False),
        ("<Think>a</Think><action>go</action>", "alfworld", "go", False),
        ("<think>门</think><action>go</action>", "alfworld", "go", False),
        (LONG, "alfworld", LONG.lower()[-30:], False),
        (LONG, "webshop", LONG.lower()[-20:], False),
        ("short", "webshop", "short", False),
        ("<think></think><action>Click[Buy Now]</action>", "webshop", "click[buy now]", True),
        ("<think></think><action>push it upwards</action>", "sokoban", "up", True),
        ("<think>箱</think><action>left</action>", "sokoban", "left", True),
        ("<think></think><action>down, then up</action>", "sokoban", "up", True),
        ("<think></think><action>jump</action>", "sokoban", "still", False),
        ("up", "sokoban", "still", False),
        ("<search> A </search>", "search", "<search>A</search>", True),
        (
            "<think>?</think><Answer>B\nC</Answer> and so on",
            "search",
            "<answer>B\nC</answer>",
            True,
        ),
        ("<answer>x</answer><search>y</search>", "search", "<search>y</search>", False),
        ("<search>x</search><search>y</search>", "search", "<search>x</search>", False),
        # what is opened counts, closed or not
        ("<search>a <answer>b</answer>", "search", "<answer>b</answer>", False),
        (
            "<think>a <search> here?</think><answer>b</answer>",
            "search",
            "<answer>b</answer>",
            False,
        ),
        # nothing is said before the first end of a search
        ("</search><answer>x</answer>", "search", "", False),
        ("<search>x", "search", "", False),
    ],
)
def test_upstream(text: str, template: str, action: str, well_formed: bool) -> None:
    assert parsed(text, template, "upstream") == Answer(action=action, well_formed=well_formed)


@pytest.mark.parametrize(
    ("text", "action", "well_formed"),
    [
        (" print('A') \n", "print('A')", True),
        ("<think>A or B?</think>\nB", "B", True),
        ("<action>go</action>", "<action>go</action>", True),
        ("<think>A</think>", "", False),
        ("", "", False),
    ],
)
def test_text(text: str, action: str, well_formed: bool) -> None:
    assert parsed(text, "think", "text") == Answer(action=action, well_formed=well_formed)


@pytest.mark.parametrize("parser", ["tags", "upstream"])
def test_a_reply_of_opening_tags_is_searched_once(
    parser: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: 131,072 characters took 7.5 s, because each tag searched the rest."""
    template = TEMPLATES["search"]
    tag = template.tags[0]
    searched = 0

    class Counted:
        def __init__(self, pattern: str, flags: int) -> None:
            self.pattern = re.compile(pattern, flags)

        def search(self, text: str, at: int = 0) -> re.Match[str] | None:
            nonlocal searched
            found = self.pattern.search(text, at)
            searched += (len(text) if found is None else found.end()) - at
            return found

    def compile_counted(pattern: str, flags: int) -> Counted:
        return Counted(pattern, flags)

    monkeypatch.setattr(
        action_parser, "re", SimpleNamespace(**vars(re) | {"compile": compile_counted})
    )
    for text in (f"<{tag}>" * 16_384, f"<{tag}></{tag}" * 8_192, f"<{tag}>x</{tag}>" * 8_192):
        searched = 0
        parse_action(text, template=template, parser=parser, opening="")
        assert 0 < searched <= 4 * len(text)


def test_blocks_are_those_of_a_regular_expression() -> None:
    pieces = ("<a>", "</a>", "<A>", "</A>", "x", "\n")
    for parts in itertools.product(pieces, repeat=5):
        text = "".join(parts)
        expected = re.findall("(<a>(.*?)</a>)", text, re.DOTALL | re.IGNORECASE)
        assert list(action_parser._blocks(text, "a")) == expected
