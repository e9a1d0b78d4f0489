"""Parse the action from the text of a reply. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from actors.prompting.template import Template, UpstreamRule

# characters of a reply without action tags that the environment gets, as in the paper's code
UNPARSED_CHARACTERS = 30
CHINESE = re.compile("[\u4e00-\u9fff]")  # CJK unified ideographs


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    action: str
    well_formed: bool


def parse_action(text: str, *, template: Template, parser: str, opening: str) -> Answer:
    """Return the action of a reply by the rule `parser`. It need not be admissible.

    "tags"      text between the template's first opening tag and the next closing one, in lower
                case and stripped
    "upstream"  as the paper's code does it: the first opening and the first closing tag wherever
                they are, and `Template.upstream`
    "text"      the whole reply, after the thought if there is one

    A template with several tags takes one block of any of them, and the tags are part of the
    action. A reply that breaks the rule is not well formed; its last characters are the action.
    Where the template thinks, a reply without <think> and </think> is not well formed either.
    `opening` is the chat template's beginning of the reply: a <think> in it counts, except for
    "upstream".
    """
    if parser == "text":
        action = text.rpartition("</think>")[2].strip()
        return Answer(action=action, well_formed=bool(action))
    tag, has_several = template.tags[0], len(template.tags) > 1
    if parser == "upstream":
        assert template.upstream is not None, "PromptForm refuses this"
        if has_several:
            return _upstream_block(text, template.tags)
        return _upstream(text, tag=tag, rule=template.upstream)
    answer = _one_block(text, template.tags) if has_several else _tagged(text, tag=tag)
    has_thought = not template.thinks or has_tags(opening + text, "think")
    return Answer(action=answer.action, well_formed=answer.well_formed and has_thought)


def has_tags(text: str, tag: str) -> bool:
    return f"<{tag}>" in text and f"</{tag}>" in text


def _tagged(text: str, *, tag: str) -> Answer:
    _, opened, rest = text.partition(f"<{tag}>")
    action, closed, _ = rest.partition(f"</{tag}>")
    if not (opened and closed):
        return Answer(action=text[-UNPARSED_CHARACTERS:].strip().lower(), well_formed=False)
    return Answer(action=action.strip().lower(), well_formed=True)


def _one_block(text: str, tags: Sequence[str]) -> Answer:
    """Return the first block of the first tag that has one; several blocks are not well formed."""
    blocks: list[str] = []
    for tag in tags:
        blocks += (found[0] for found in _blocks(text, tag))
    if not blocks:
        return Answer(action=text[-UNPARSED_CHARACTERS:], well_formed=False)
    return Answer(action=blocks[0], well_formed=len(blocks) == 1)


def _blocks(text: str, tag: str) -> Iterator[tuple[str, str]]:
    """Yield (block with its tags, text between them) of each block, whatever the tag's case is.

    One regular expression for a block would search the rest of the reply for every opening tag.
    """
    opening = re.compile(f"<{tag}>", re.IGNORECASE)
    closing = re.compile(f"</{tag}>", re.IGNORECASE)
    at = 0
    while opened := opening.search(text, at):
        closed = closing.search(text, opened.end())
        if closed is None:
            return
        at = closed.end()
        yield text[opened.start() : at], text[opened.end() : closed.start()]


def _upstream_block(text: str, tags: Sequence[str]) -> Answer:
    """Return the first block of the first tag that has one.

    Only the text up to the first closing tag of the first closed tag is searched. The reply is well
    formed if it opens no other block, not even in the thought.
    """
    closing = next((f"</{tag}>" for tag in tags if f"</{tag}>" in text), None)
    searched = text if closing is None else text.partition(closing)[0] + closing
    n_opened = sum(len(re.findall(f"<{tag}>", text, re.IGNORECASE)) for tag in tags)
    for tag in tags:
        block = next(_blocks(searched, tag), None)
        if block is not None:
            return Answer(action=f"<{tag}>{block[1].strip()}</{tag}>", well_formed=n_opened == 1)
    return Answer(action="", well_formed=False)


def _upstream(text: str, *, tag: str, rule: UpstreamRule) -> Answer:
    lowered = text.lower()
    start, end = lowered.find(f"<{tag}>"), lowered.find(f"</{tag}>")
    well_formed = has_tags(text, "think") and not (rule.refuse_chinese and CHINESE.search(text))
    if start < 0 or end < 0:
        n_unparsed = min(rule.unparsed_characters, len(lowered))
        action, well_formed = lowered[len(lowered) - n_unparsed :], False
    else:
        action = lowered[start + len(tag) + 2 : end].strip()
    if rule.words:
        named = [word for word in rule.words if word in action]
        if not named:
            return Answer(action=rule.words[-1], well_formed=False)
        action = named[0]
    return Answer(action=action, well_formed=well_formed)
