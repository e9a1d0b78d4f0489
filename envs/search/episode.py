"""One question being answered: what both environments share, between asking and having asked for
passages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from envs.base import Observation, Task, Transition
from envs.search.passages import Hit, shown
from envs.search.questions import Question
from envs.search.scoring import ANSWER, SEARCH, Reply, is_match


def task_of(question: Question, *, env_name: str, split: str, data: Mapping[str, str]) -> Task:
    """It has all that an episode needs, `data` included, so that whoever plays it needs no file of
    questions.
    """
    return Task(
        id=question.id,
        env_name=env_name,
        split=split,
        seed=0,  # nothing is drawn
        data={
            **data,
            "type": question.source,
            "question": question.text,
            "golden_answers": json.dumps(question.golden_answers, ensure_ascii=False),
        },
    )


class Episode:
    """Ends with the first answer; the turn limit is the runner's (`env.max_steps`)."""

    def __init__(self, task: Task, *, list_actions: bool) -> None:
        self._question, self._golden = (
            task.data["question"],
            tuple(json.loads(task.data["golden_answers"])),
        )
        self._list_actions, self.is_over = list_actions, False

    def first(self) -> Observation:
        """The question is the objective, and the first anchor state; nothing is seen yet."""
        return Observation(
            text="", objective=self._question, anchor=self._question, actions=self._actions([])
        )

    def after(self, reply: Reply, hits: Sequence[Hit]) -> Transition:
        """What is seen then: `<information>` with the passages of a search, nothing if the reply
        was neither.
        """
        self.is_over = reply.kind == ANSWER
        won = reply.kind == ANSWER and is_match(reply.text, self._golden)
        text = f"<information>{shown(hits)}</information>" if reply.kind == SEARCH else ""
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
        """Two things that make sense anywhere, to choose from: searching for the question,
        answering with a title.
        """
        if not self._list_actions:
            return None
        titles = dict.fromkeys(hit.passage.contents.partition("\n")[0].strip('"') for hit in hits)
        return (
            f"<{SEARCH}>{self._question}</{SEARCH}>",
            *(f"<{ANSWER}>{title}</{ANSWER}>" for title in titles),
        )
