"""What shoppers want: WebShop's goals, with its prices, in its order, in its split. All of it is
fixed by one seed.

A synthetic instruction is one goal for each choice of its product's options; a crowd worker's is
one. Prices are drawn first: of each product that has a range, then of each goal the most it may
cost. WebShop leaves their seed to the process, so that instructions differ from run to run; here it
is `seed`. The order is shuffled with seed 233, always, as WebShop does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import numpy as np

from envs.webshop.catalogue import Catalogue, Product

SYNTHETIC, HUMAN = "synthetic", "human"
ORDER_SEED = 233
# places in that order, the original's
SPLITS = {"test": (0, 500), "eval": (500, 1500), "train": (1500, None)}
LIMITS = [10.0 * n for n in range(1, 100)]  # dollars
N_LIMITS = 4  # the next ones above the price, from which two are drawn
NO_LIMIT = 1_000_000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    product: Product
    instruction: str
    attributes: tuple[str, ...]
    # values, of a synthetic instruction with the option's name before it
    options: tuple[str | tuple[str, str], ...]
    price_limit: float  # dollars


class Goals:
    """Goals by their place in the fixed order."""

    def __init__(self, catalogue: Catalogue, instructions: str, *, seed: int) -> None:
        self._catalogue = catalogue
        self._is_human = instructions == HUMAN
        rng = Random(seed)
        self.price_D = [
            low if math.isnan(high) else rng.uniform(low, high)
            for low, high in zip(catalogue.low_D.tolist(), catalogue.high_D.tolist(), strict=True)
        ]
        n_D = catalogue.n_human_D if self._is_human else catalogue.n_synthetic_D
        self._starts = np.concatenate([[0], np.cumsum(n_D)])
        # One limit for a synthetic instruction and all its choices, one for each of the crowd
        # workers'.
        n_limits_D = (n_D if self._is_human else catalogue.asks_D).tolist()
        self._limits = [
            _draw_limit(rng, price)
            for price, n in zip(self.price_D, n_limits_D, strict=True)
            for _ in range(n)
        ]
        self._limit_starts = np.concatenate([[0], np.cumsum(n_limits_D)])
        order = list(range(int(self._starts[-1])))
        Random(ORDER_SEED).shuffle(order)
        self._order = np.array(order, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, place: int) -> Goal:
        at = self._product_number(place)
        product, choice = self._catalogue[at], int(self._order[place] - self._starts[at])
        if self._is_human:
            instruction, asked = product.human[choice], ""
            options: tuple[str | tuple[str, str], ...] = instruction.options
        else:
            assert product.synthetic is not None
            instruction, chosen = product.synthetic, _chosen(product, choice)
            options = tuple(chosen.items())
            asked = (
                " with " + ", and ".join(f"{name}: {value}" for name, value in chosen.items())
                if chosen
                else ""
            )
        limit = self._limits[int(self._limit_starts[at]) + (choice if self._is_human else 0)]
        price = f", and price lower than {limit:.2f} dollars" if limit < NO_LIMIT else ""
        return Goal(
            product=product,
            instruction=f"{instruction.text}{asked}{price}",
            attributes=instruction.attributes,
            options=options,
            price_limit=limit,
        )

    def category(self, place: int) -> str:
        """Which of the shop's five: what a task's type is."""
        return self._catalogue[self._product_number(place)].category

    def places(self, split: str) -> range:
        first, last = SPLITS[split]
        return range(len(self))[first:last]

    def _product_number(self, place: int) -> int:
        if not 0 <= place < len(self):
            raise IndexError(f"there are {len(self)} goals, none is at place {place}")
        return int(np.searchsorted(self._starts, self._order[place], side="right")) - 1


def _draw_limit(rng: Random, price: float) -> float:
    above = [limit for limit in LIMITS if limit > price][:N_LIMITS]
    return max(rng.sample(above, 2)) if len(above) >= 2 else NO_LIMIT


def _chosen(product: Product, choice: int) -> dict[str, str]:
    """The values of one of the product's choices by option, options in order of their names; the
    last one's change fastest.
    """
    chosen: dict[str, str] = {}
    for name in sorted(product.options, reverse=True):
        values = product.options[name]
        choice, at = divmod(choice, len(values))
        chosen[name] = values[at]
    return dict(reversed(chosen.items()))
