"""What a reply asks for, and whether an answer is right: pure functions of text, by the rules of
the paper's code.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass

SEARCH, ANSWER = "search", "answer"
BLOCK = {
    kind: re.compile(f"<{kind}>(.*?)</{kind}>", re.DOTALL | re.IGNORECASE)
    for kind in (SEARCH, ANSWER)
}
OPENING = {kind: re.compile(f"<{kind}>", re.IGNORECASE) for kind in (SEARCH, ANSWER)}
ARTICLE = re.compile(r"\b(a|an|the)\b")
# ASCII only: a typographic quote stays
WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    kind: str  # "search", "answer", or "" for neither
    text: str  # what stands between the tags, stripped
    is_valid: bool


def read_reply(action: str) -> Reply:
    """The first search of what comes before the first `</search>`, else the first answer.

    It is valid if there is one and if no other block is opened anywhere, of either kind.
    """
    said = action
    for kind in (SEARCH, ANSWER):
        if f"</{kind}>" in action:
            said = action.partition(f"</{kind}>")[0] + f"</{kind}>"
            break
    n_opened = sum(len(opening.findall(action)) for opening in OPENING.values())
    for kind, block in BLOCK.items():
        found = block.search(said)
        if found is not None:
            return Reply(kind=kind, text=found[1].strip(), is_valid=n_opened == 1)
    return Reply(kind="", text="", is_valid=False)


def is_match(answer: str, golden_answers: Sequence[str]) -> bool:
    """Exact match: equal to one of the golden answers when both are `normalised`."""
    return normalised(answer) in {normalised(golden) for golden in golden_answers}


def normalised(text: str) -> str:
    """Lower case, without ASCII punctuation, without the words a, an and the, single spaces; in
    this order.
    """
    return " ".join(ARTICLE.sub(" ", text.lower().translate(WITHOUT_PUNCTUATION)).split())
