"""WebShop as an environment: one shopper, one instruction, until something is bought.

Options:
    data           folder with WebShop's files
    catalogue      small (1,000 products) or full
    instructions   synthetic or human
    heldout        official split that is held out: test or eval
    train_tasks, heldout_tasks
                   use the first so many of each split; 0 for all
    seed           of the prices
    observation    whole: WebShop's text mode. page: as in the paper, without the instruction, each
                   text in quotes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from envs import bm25
from envs.base import Observation, Task, Transition
from envs.options import OptionsError, check_options, check_split, whole_numbers
from envs.webshop import nouns, pages, reward
from envs.webshop.catalogue import FULL, SMALL, open_catalogue, packed_folder
from envs.webshop.goals import HUMAN, SPLITS, SYNTHETIC, Goal, Goals

SEARCH_ACTION = "search[<your query>]"
CHOICES = {
    "catalogue": (SMALL, FULL),
    "instructions": (SYNTHETIC, HUMAN),
    "heldout": ("test", "eval"),
    "observation": ("whole", "page"),
}
NUMBERS = ("train_tasks", "heldout_tasks", "seed")
# Searches whose hits a process keeps: shoppers go back and forth, and a group searches alike.
KEPT_QUERIES = 10_000


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


class Shop:
    """Catalogue, goals, search and scores, shared by all environments of a process."""

    def __init__(self, data: Path, which: str, *, instructions: str, seed: int) -> None:
        self.catalogue = open_catalogue(data, which)
        self.goals = Goals(self.catalogue, instructions, seed=seed)
        self._data, self._which = data, which
        self.hits = lru_cache(maxsize=KEPT_QUERIES)(self._search)

    def score(self, goal: Goal, number: int, options: Mapping[str, str]) -> float:
        """Return the score of buying product `number` with these options."""
        product, tagged = self.catalogue[number], _tagged_nouns(self._data)
        title_score = reward.title_score(
            nouns.nouns(goal.product.name, tagged), nouns.nouns(product.name, tagged)
        )
        return reward.score(
            goal, product, options, price=self.goals.price_R[number], title_score=title_score
        )

    def _search(self, query: str) -> list[int]:
        """Return the numbers of the products found, best first."""
        return bm25.search(_index(self._data, self._which), query, limit=pages.MAX_HITS)


@cache
def open_shop(data: Path, which: str, *, instructions: str, seed: int) -> Shop:
    return Shop(data, which, instructions=instructions, seed=seed)


@cache
def _index(data: Path, which: str) -> bm25.Index:
    if which != SMALL:
        return bm25.load(packed_folder(data))
    catalogue = open_catalogue(data, which)
    names = [product.asin for product in catalogue]
    return bm25.build((product.contents for product in catalogue), names)


@cache
def _tagged_nouns(data: Path) -> tuple[nouns.Tagged, ...]:
    files = (data / nouns.TAGGED, nouns.TAGGED_SMALL)
    return tuple(nouns.load(path) for path in files if path.is_file())


class WebShopEnv:
    """Actions are `search[words]` and `click[name]`, in capital or small letters.

    As in WebShop, searching is possible from every page, also where it is not listed. After `buy
    now` the episode is over. Any other text, and a click on something absent, changes nothing and
    is invalid. The reward is 1 for a perfect purchase, else 0. `task_score` is the purchase's
    score, and 0 until something is bought.
    """

    deterministic = True

    def __init__(self, options: Mapping[str, object]) -> None:
        self._options = _parse(options)
        self._shop: Shop  # opened by the first reset; all environments of a process share it
        self._is_over = True

    @classmethod
    def tasks(cls, split: str, options: Mapping[str, object]) -> Sequence[Task]:
        check_split(split)
        parsed = _parse(options)
        if split == "train":
            official, limit = "train", parsed.train_tasks
        else:
            official, limit = parsed.heldout, parsed.heldout_tasks
        shop = _shop(parsed)
        indices = shop.goals.indices(official)
        if not indices:
            raise ValueError(
                f"webshop has no {official} tasks: {len(shop.goals)} {parsed.instructions} "
                f"instructions, and {official} ones begin at number {SPLITS[official][0]}; take "
                "instructions=synthetic or catalogue=full"
            )
        prefix = f"webshop-{parsed.instructions}-{len(shop.catalogue)}-seed{parsed.seed}-{official}"
        return [
            Task(
                id=f"{prefix}-{index}",
                env_name="webshop",
                split=split,
                seed=index,
                data={"goal": str(index), "split": official, "type": shop.goals.category(index)},
            )
            for index in (indices[:limit] if limit else indices)
        ]

    def reset(self, task: Task) -> Observation:
        self._shop = _shop(self._options)
        self._goal: Goal = self._shop.goals[int(task.data["goal"])]
        self._is_over = False
        self._leave()
        return self._observe()

    def step(self, action: str) -> Transition:
        if self._is_over:
            raise ValueError("the episode is over: call reset(task) before step")
        name, target = read_action(action)
        score = 0.0  # an episode that buys nothing scores 0, as in WebShop
        is_valid = True
        if name == "search":
            self._search(target, page=1)
        elif name != "click" or target == "search" or target not in self._page.buttons:
            is_valid = False
        elif target == pages.BUY_NOW:
            score = self._buy()
        else:
            self._click(target)
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

    def state_key(self) -> str:
        place = (self._query, self._result_page, self._product, self._is_sub_page)
        # in the order of choice, in which the last page lists the options
        return repr((self._page, place, list(self._chosen.items()), self._is_over))

    def close(self) -> None:
        self._is_over = True

    def _leave(self) -> None:
        """Go to the search page, with no product and no options chosen."""
        self._page: pages.Page = pages.SEARCH_PAGE
        self._query, self._result_page = "", 1
        self._product: int | None = None  # number of the product on the page
        self._is_sub_page = False
        self._chosen: dict[str, str] = {}

    def _search(self, query: str, *, page: int) -> None:
        hits = self._shop.hits(query)
        shown = hits[(page - 1) * pages.PAGE_HITS : page * pages.PAGE_HITS]
        products = [self._shop.catalogue[hit] for hit in shown]
        self._leave()
        self._query, self._result_page = query, page
        self._shown = {
            product.asin.lower(): hit for hit, product in zip(shown, products, strict=True)
        }
        self._page = pages.results_page(products, number=page, n_hits=len(hits))

    def _click(self, name: str) -> None:
        if name == pages.BACK_TO_SEARCH:
            self._leave()
        elif self._product is None and name == pages.NEXT:
            self._search(self._query, page=self._result_page + 1)
        elif self._product is None and name == pages.PREVIOUS:
            self._search(self._query, page=self._result_page - 1)
        elif self._product is None:
            self._show(self._shown[name])
        elif name == pages.PREVIOUS and not self._is_sub_page:
            self._search(self._query, page=self._result_page)
        elif name == pages.PREVIOUS:
            self._show(self._product)
        elif name in pages.SUB_PAGES:
            self._is_sub_page = True
            self._page = pages.sub_page(self._shop.catalogue[self._product], name)
        else:
            options = self._shop.catalogue[self._product].options
            with_value = [option for option, values in options.items() if name in values]
            self._chosen[with_value[-1]] = name  # like WebShop, the last option with this value

    def _show(self, number: int) -> None:
        self._product, self._is_sub_page = number, False
        self._page = pages.item_page(self._shop.catalogue[number])

    def _buy(self) -> float:
        assert self._product is not None
        score = self._shop.score(self._goal, self._product, self._chosen)
        self._page = pages.done_page(self._shop.catalogue[self._product], self._chosen, score=score)
        self._is_over = True
        return score

    def _observe(self) -> Observation:
        page = self._page
        quoted = pages.SEPARATOR.join(f"'{text}'" for text in page.texts)
        heading = ["WebShop"] if page.has_search_bar else []
        if not self._is_over:
            heading += ["Instruction:", self._goal.instruction]
        whole = pages.SEPARATOR.join((*heading, *page.texts))
        searches = (SEARCH_ACTION,) if page.has_search_bar else ()
        return Observation(
            text=whole if self._is_over or self._options.observation == "whole" else quoted,
            objective=self._goal.instruction,
            anchor=whole if self._is_over else quoted,
            actions=(*searches, *(f"click[{button}]" for button in page.buttons)),
        )


def read_action(action: str) -> tuple[str, str]:
    """Return name and target of `name[target]`, the target in lower case; "" and "" for others.

    These are the groups of WebShop's pattern `(.+)\\[(.+)\\]`, which a text of many `[` keeps
    busy for minutes: the last `[` that has a target behind it, to the last `]`, in the first line.
    """
    line = action.partition("\n")[0]
    end = line.rfind("]")
    start = line.rfind("[", 1, max(end - 1, 1))
    return (line[:start], line[start + 1 : end].lower()) if start > 0 else ("", "")


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
    whole_numbers("webshop", options, dict.fromkeys(NUMBERS, 0))
    if not Path(str(options["data"])).is_dir():
        raise ValueError(
            f"webshop option data={options['data']!r} is no folder; docs/webshop.md says where the "
            "files are from"
        )
    return _Options(**{**options, "data": Path(str(options["data"]))})  # type: ignore[arg-type]
