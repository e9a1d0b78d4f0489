"""WebShop as an environment: one shopper, one instruction, until something is bought.

Options: `data` (str, the folder with WebShop's files), `catalogue` ("small": 1,000 products, or
"full"), `instructions` ("synthetic" or "human"), `heldout` (which official split is played as
held-out: "test" or "eval"), `train_tasks`, `heldout_tasks` (the first so many of each, 0 for all),
`seed` (of the prices), `observation` ("whole": what WebShop's text mode gives; "page": as in the
paper, without the instruction, each text in quotes).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from envs.base import Observation, Task, Transition
from envs.options import OptionsError, check_options, check_split, whole_number
from envs.webshop.catalogue import FULL, SMALL
from envs.webshop.goals import HUMAN, SPLITS, SYNTHETIC, Goal
from envs.webshop.pages import (
    BACK_TO_SEARCH,
    BUY_NOW,
    NEXT,
    PAGE_HITS,
    PREVIOUS,
    SEARCH_PAGE,
    SEPARATOR,
    SUB_PAGES,
    Page,
    done_page,
    item_page,
    results_page,
    sub_page,
)
from envs.webshop.shop import Shop, open_shop

ACTION = re.compile(r"(.+)\[(.+)\]")
SEARCH_ACTION = "search[<your query>]"
CHOICES = {
    "catalogue": (SMALL, FULL),
    "instructions": (SYNTHETIC, HUMAN),
    "heldout": ("test", "eval"),
    "observation": ("whole", "page"),
}
NUMBERS = ("train_tasks", "heldout_tasks", "seed")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    data: Path
    catalogue: str
    instructions: str
    heldout: str
    observation: str
    train_tasks: int
    heldout_tasks: int
    seed: int


class WebShopEnv:
    """Steps are `search[words]` and `click[name]`. As in WebShop one may search from every page,
    also from those that have no search bar and do not list it; capital letters make no difference;
    after `buy now` the episode is over.

    Any other text, and a click on something absent, changes nothing and is not `valid`.
    `prompt.invalid` says whether that is penalised. The reward is 1 for a perfect purchase, else 0.
    `task_score` is the purchase's grade, and 0 until something is bought.
    """

    def __init__(self, options: Mapping[str, object]) -> None:
        self._options = _parse(options)
        # opened by the first reset; all environments of a process share it
        self._shop: Shop | None = None
        self._is_over = True

    @classmethod
    def tasks(cls, split: str, options: Mapping[str, object]) -> Sequence[Task]:
        check_split(split)
        parsed = _parse(options)
        names = {
            "train": ("train", parsed.train_tasks),
            "heldout": (parsed.heldout, parsed.heldout_tasks),
        }
        official, limit = names[split]
        shop = _shop(parsed)
        places = shop.goals.places(official)
        if not places:
            raise ValueError(
                f"webshop has no {official} tasks: {len(shop.goals)} {parsed.instructions} "
                f"instructions, and {official} ones "
                f"begin at number {SPLITS[official][0]}; take instructions=synthetic or "
                "catalogue=full"
            )
        prefix = f"webshop-{parsed.instructions}-{len(shop.catalogue)}-seed{parsed.seed}-{official}"
        return [
            Task(
                id=f"{prefix}-{place}",
                env_name="webshop",
                split=split,
                seed=place,
                data={"goal": str(place), "split": official, "type": shop.goals.category(place)},
            )
            for place in (places[:limit] if limit else places)
        ]

    def reset(self, task: Task) -> Observation:
        self._shop = _shop(self._options)
        self._goal: Goal = self._shop.goals[int(task.data["goal"])]
        self._is_over = False
        self._leave()
        return self._observe()

    def step(self, action: str) -> Transition:
        if self._is_over or self._shop is None:
            raise ValueError("the episode is over: call reset(task) before step")
        match = ACTION.match(action)
        name, what = (match[1], match[2].lower()) if match else ("", "")
        score = 0.0  # an episode that buys nothing scores 0, as in WebShop
        is_valid = True
        if name == "search":
            self._search(what, number=1)
        elif name != "click" or what == "search" or what not in self._page.buttons:
            is_valid = False
        elif what == BUY_NOW:
            score = self._buy()
        else:
            self._click(what)
        won = score == 1.0
        return Transition(
            observation=self._observe(),
            reward=float(won),
            terminated=self._is_over,
            truncated=False,  # the step limit is the runner's
            won=won,
            valid=is_valid,
            task_score=score,
        )

    def close(self) -> None:
        self._shop = None
        self._is_over = True

    def _leave(self) -> None:
        """To the search page, with nothing in hand."""
        self._page: Page = SEARCH_PAGE
        self._query, self._number = "", 1
        self._product: int | None = None  # number of the one looked at
        self._is_sub_page = False
        self._chosen: dict[str, str] = {}

    def _search(self, query: str, *, number: int) -> None:
        assert self._shop is not None
        hits = self._shop.hits(query)
        shown = hits[(number - 1) * PAGE_HITS : number * PAGE_HITS]
        products = [self._shop.catalogue[hit] for hit in shown]
        self._leave()
        self._query, self._number = query, number
        self._shown = {
            product.asin.lower(): hit for hit, product in zip(shown, products, strict=True)
        }
        self._page = results_page(products, number=number, n_hits=len(hits))

    def _click(self, what: str) -> None:
        assert self._shop is not None
        if what == BACK_TO_SEARCH:
            self._leave()
        elif self._product is None:
            if what in (NEXT, PREVIOUS):
                self._search(self._query, number=self._number + (1 if what == NEXT else -1))
            else:
                self._show(self._shown[what])
        elif what == PREVIOUS and not self._is_sub_page:
            self._search(self._query, number=self._number)
        elif what == PREVIOUS:
            self._show(self._product)
        elif what in SUB_PAGES:
            self._is_sub_page = True
            self._page = sub_page(self._shop.catalogue[self._product], what)
        else:  # of two options with this value the page's last one counts
            options = self._shop.catalogue[self._product].options
            self._chosen[[name for name, values in options.items() if what in values][-1]] = what

    def _show(self, number: int) -> None:
        assert self._shop is not None
        self._product, self._is_sub_page = number, False
        self._page = item_page(self._shop.catalogue[number])

    def _buy(self) -> float:
        assert self._shop is not None and self._product is not None
        score = self._shop.score(self._goal, self._product, self._chosen)
        self._page = done_page(self._shop.catalogue[self._product], self._chosen, score=score)
        self._is_over = True
        return score

    def _observe(self) -> Observation:
        page = self._page
        quoted = SEPARATOR.join(f"'{text}'" for text in page.texts)
        before: tuple[str, ...] = (
            ("Instruction:", self._goal.instruction) if not self._is_over else ()
        )
        before = ("WebShop", *before) if page.has_search_bar else before
        whole = SEPARATOR.join((*before, *page.texts))
        return Observation(
            text=whole if self._is_over or self._options.observation == "whole" else quoted,
            objective=self._goal.instruction,
            anchor=whole if self._is_over else quoted,
            actions=((SEARCH_ACTION,) if page.has_search_bar else ())
            + tuple(f"click[{button}]" for button in page.buttons),
        )


def _shop(options: _Options) -> Shop:
    return open_shop(
        options.data.resolve(),
        options.catalogue,
        instructions=options.instructions,
        seed=options.seed,
    )


def _parse(options: Mapping[str, object]) -> _Options:
    check_options("webshop", options, ("data", *CHOICES, *NUMBERS))
    for name, choices in CHOICES.items():
        if options[name] not in choices:
            raise OptionsError(
                f"webshop option {name}={options[name]!r} must be one of {', '.join(choices)}"
            )
    for name in NUMBERS:
        whole_number("webshop", name, options[name], least=0)
    if not Path(str(options["data"])).is_dir():
        raise ValueError(
            f"webshop option data={options['data']!r} is no folder; docs/webshop.md says where the "
            "files are from"
        )
    return _Options(**{**options, "data": Path(str(options["data"]))})  # type: ignore[arg-type]
