"""One question being answered: read a reply, show passages, judge an answer.

The rules are those of the paper's code. Asking for the passages is left to the environments.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass

from envs.base import Observation, Task, Transition
from envs.search.corpus import Hit

SEARCH, ANSWER = "search", "answer"
BLOCK = {
    kind: re.compile(f"<{kind}>(.*?)</{kind}>", re.DOTALL | re.IGNORECASE)
    for kind in (SEARCH, ANSWER)
}
OPENING_TAG = re.compile(f"<(?:{SEARCH}|{ANSWER})>", re.IGNORECASE)
ARTICLE = re.compile(r"\b(a|an|the)\b")
# ASCII only: a typographic quote stays
WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    kind: str  # SEARCH, ANSWER, or "" for neither
    text: str  # between the tags, stripped
    is_valid: bool


def read_reply(action: str) -> Reply:
    """Return the first search before the first `</search>`, else the first answer.

    The reply is valid if the whole action opens exactly one block.
    """
    text = action
    for kind in (SEARCH, ANSWER):
        end_tag = f"</{kind}>"
        if end_tag in action:
            text = action.partition(end_tag)[0] + end_tag
            break
    for kind, block in BLOCK.items():
        found = block.search(text)
        if found is not None:
            is_valid = len(OPENING_TAG.findall(action)) == 1
            return Reply(kind=kind, text=found[1].strip(), is_valid=is_valid)
    return Reply(kind="", text="", is_valid=False)


def is_match(answer: str, golden_answers: Sequence[str]) -> bool:
    """Return whether the answer equals a golden one, both normalised."""
    return normalise(answer) in {normalise(golden) for golden in golden_answers}


def normalise(text: str) -> str:
    """Return the text in lower case, without punctuation, articles and double spaces."""
    # punctuation first: "the." then is an article, too
    return " ".join(ARTICLE.sub(" ", text.lower().translate(WITHOUT_PUNCTUATION)).split())


def show_passages(hits: Sequence[Hit]) -> str:
    """Return the text that the agent reads: `Doc 1(Title: ...) text`, one passage a line."""
    lines = []
    for number, hit in enumerate(hits, start=1):
        title, _, text = hit.passage.contents.partition("\n")
        lines.append(f"Doc {number}(Title: {title}) {text}\n")
    return "".join(lines)


class Episode:
    """One question. It ends with the first answer; the runner limits the steps."""

    def __init__(self, task: Task, *, list_actions: bool) -> None:
        self._question = task.data["question"]
        self._golden_answers = json.loads(task.data["golden_answers"])
        self._list_actions, self.is_over = list_actions, False

    def first(self) -> Observation:
        """Return the first observation: no text yet, the question as objective and anchor."""
        return Observation(
            text="", objective=self._question, anchor=self._question, actions=self._actions([])
        )

    def after(self, reply: Reply, hits: Sequence[Hit]) -> Transition:
        """Return the transition of a reply, with the passages that its search found."""
        self.is_over = reply.kind == ANSWER
        won = self.is_over and is_match(reply.text, self._golden_answers)
        text = f"<information>{show_passages(hits)}</information>" if reply.kind == SEARCH else ""
        return Transition(
            observation=Observation(
                text=text, objective=self._question, actions=self._actions(hits)
            ),
            reward=float(won),
            terminated=self.is_over,
            truncated=False,
            won=won,
            valid=reply.is_valid,
        )

    def _actions(self, hits: Sequence[Hit]) -> tuple[str, ...] | None:
        """Return actions for a policy that can only choose: search the question, answer a title."""
        if not self._list_actions:
            return None
        titles = dict.fromkeys(hit.passage.contents.partition("\n")[0].strip('"') for hit in hits)
        return (
            f"<{SEARCH}>{self._question}</{SEARCH}>",
            *(f"<{ANSWER}>{title}</{ANSWER}>" for title in titles),
        )
