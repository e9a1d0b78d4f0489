"""From the text of a reply to an action: pure functions of text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from actors.prompting.template import Template, UpstreamRule

# what an environment gets to see of a reply without action tags, as in the authors' code
UNPARSED_CHARACTERS = 30
CHINESE = re.compile("[\u4e00-\u9fff]")  # CJK unified ideographs


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    action: str
    well_formed: bool


def parse_action(text: str, *, template: Template, parser: str, opening: str) -> Answer:
    """The action in a reply, by the rule `parser`. Whether the action is admissible is not asked
    here.

    "tags"      between the template's tags, the first and the first closing one after it,
    lower-cased and stripped
    "upstream"  as the paper's code: the first of each tag wherever it is, and `Template.upstream`
    "text"      all of it, after the thought if there is one

    A template with several tags takes exactly one block of any of them; its tags are part of the
    action. A reply that does not follow the rule gives its own end as the action, and is not well
    formed; nor is one that lacks <think> or </think> where the template thinks. `opening` is how
    the chat template began the reply: a <think> in it counts, but for "upstream".
    """
    if parser == "text":
        return _whole(text)
    if parser == "upstream":
        assert template.upstream is not None, "PromptForm refuses this"
        if len(template.tags) > 1:
            return _upstream_block(text, template.tags)
        return _upstream(text, tag=template.tags[0], rule=template.upstream)
    answer = (
        _one_block(text, template.tags)
        if len(template.tags) > 1
        else _tagged(text, tag=template.tags[0])
    )
    has_thought = not template.thinks or has_tags(opening + text, "think")
    return Answer(action=answer.action, well_formed=answer.well_formed and has_thought)


def has_tags(text: str, tag: str) -> bool:
    return f"<{tag}>" in text and f"</{tag}>" in text


def _whole(text: str) -> Answer:
    action = text.rpartition("</think>")[2].strip()
    return Answer(action=action, well_formed=bool(action))


def _tagged(text: str, *, tag: str) -> Answer:
    _, opened, rest = text.partition(f"<{tag}>")
    action, closed, _ = rest.partition(f"</{tag}>")
    if not (opened and closed):
        return Answer(action=text[-UNPARSED_CHARACTERS:].strip().lower(), well_formed=False)
    return Answer(action=action.strip().lower(), well_formed=True)


def _one_block(text: str, tags: Sequence[str]) -> Answer:
    """The first block of the first tag that has one. Blocks of two tags, or two of one, are not
    well formed.
    """
    found = {
        tag: re.findall(f"<{tag}>.*?</{tag}>", text, re.DOTALL | re.IGNORECASE) for tag in tags
    }
    blocks = [block for tag in tags for block in found[tag]]
    if not blocks:
        return Answer(action=text[-UNPARSED_CHARACTERS:], well_formed=False)
    return Answer(action=blocks[0], well_formed=len(blocks) == 1)


def _upstream_block(text: str, tags: Sequence[str]) -> Answer:
    """The first block of the first tag that has one, up to where the first tag that is closed is
    closed for the first time.

    Well formed if no other block is opened in the whole reply, a thought included.
    """
    closing = next((f"</{tag}>" for tag in tags if f"</{tag}>" in text), None)
    said = text if closing is None else text.partition(closing)[0] + closing
    n_opened = sum(len(re.findall(f"<{tag}>", text, re.IGNORECASE)) for tag in tags)
    for tag in tags:
        block = re.search(f"<{tag}>(.*?)</{tag}>", said, re.DOTALL | re.IGNORECASE)
        if block is not None:
            return Answer(action=f"<{tag}>{block[1].strip()}</{tag}>", well_formed=n_opened == 1)
    return Answer(action="", well_formed=False)


def _upstream(text: str, *, tag: str, rule: UpstreamRule) -> Answer:
    lowered = text.lower()
    start, end = lowered.find(f"<{tag}>"), lowered.find(f"</{tag}>")
    well_formed = has_tags(text, "think") and not (rule.refuse_chinese and CHINESE.search(text))
    if start < 0 or end < 0:
        action, well_formed = _end(lowered, rule.unparsed_characters), False
    else:
        action = lowered[start + len(tag) + 2 : end].strip()
    if rule.words:
        named = [word for word in rule.words if word in action]
        action, well_formed = (named[0], well_formed) if named else (rule.words[-1], False)
    return Answer(action=action, well_formed=well_formed)


def _end(text: str, characters: int) -> str:
    return text[len(text) - min(characters, len(text)) :]
