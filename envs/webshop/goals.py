"""Make the goals of WebShop's shoppers, with its prices, order and splits, fixed by one seed.

A synthetic instruction gives one goal for each choice of its product's options. A crowd worker's
instruction is one goal. Prices are drawn first: one for each product with a range, then the most
that each goal may cost. WebShop does not fix their seed, so its instructions differ from run to
run; here it is `seed`. The order is shuffled with seed 233, as WebShop does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import numpy as np

from envs.webshop.catalogue import Catalogue, Product

SYNTHETIC, HUMAN = "synthetic", "human"
ORDER_SEED = 233  # of the order of goals, WebShop's own
# indices in that order, as in WebShop
SPLITS = {"test": (0, 500), "eval": (500, 1500), "train": (1500, None)}
LIMITS = [10.0 * n for n in range(1, 100)]  # dollars
N_LIMITS = 4  # limits above the price from which two are drawn
NO_LIMIT = 1_000_000.0  # dollars; above all prices


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    product: Product
    instruction: str
    attributes: tuple[str, ...]
    # values; for a synthetic instruction pairs of name and value
    options: tuple[str | tuple[str, str], ...]
    price_limit: float  # dollars


class Goals:
    """All goals, by their index in the fixed order."""

    def __init__(self, catalogue: Catalogue, instructions: str, *, seed: int) -> None:
        self._catalogue = catalogue
        self._is_human = instructions == HUMAN
        rng = Random(seed)
        self.price_R = [
            low if math.isnan(high) else rng.uniform(low, high)
            for low, high in zip(catalogue.low_R.tolist(), catalogue.high_R.tolist(), strict=True)
        ]
        n_R = catalogue.n_human_R if self._is_human else catalogue.n_synthetic_R
        self._starts = np.concatenate([[0], np.cumsum(n_R)])
        # All choices of a synthetic instruction share one price limit.
        n_limits_R = (n_R if self._is_human else catalogue.asks_R).tolist()
        self._limits = [
            _draw_limit(rng, price)
            for price, n in zip(self.price_R, n_limits_R, strict=True)
            for _ in range(n)
        ]
        self._limit_starts = np.concatenate([[0], np.cumsum(n_limits_R)])
        order = list(range(int(self._starts[-1])))
        Random(ORDER_SEED).shuffle(order)
        self._order = np.array(order, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Goal:
        at = self._product_number(index)
        product, choice = self._catalogue[at], int(self._order[index] - self._starts[at])
        if self._is_human:
            instruction, asked = product.human[choice], ""
            options: tuple[str | tuple[str, str], ...] = instruction.options
        else:
            assert product.synthetic is not None
            instruction, chosen = product.synthetic, _chosen(product, choice)
            options = tuple(chosen.items())
            asked = ", and ".join(f"{name}: {value}" for name, value in chosen.items())
            asked = f" with {asked}" if asked else ""
        limit = self._limits[int(self._limit_starts[at]) + (choice if self._is_human else 0)]
        price = f", and price lower than {limit:.2f} dollars" if limit < NO_LIMIT else ""
        return Goal(
            product=product,
            instruction=f"{instruction.text}{asked}{price}",
            attributes=instruction.attributes,
            options=options,
            price_limit=limit,
        )

    def category(self, index: int) -> str:
        """Return which of the shop's five categories the product is in."""
        return self._catalogue[self._product_number(index)].category

    def indices(self, split: str) -> range:
        """Return the indices of an official split."""
        first, last = SPLITS[split]
        return range(len(self))[first:last]

    def _product_number(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"there are {len(self)} goals, none has index {index}")
        return int(np.searchsorted(self._starts, self._order[index], side="right")) - 1


def _draw_limit(rng: Random, price: float) -> float:
    above = [limit for limit in LIMITS if limit > price][:N_LIMITS]
    return max(rng.sample(above, 2)) if len(above) >= 2 else NO_LIMIT


def _chosen(product: Product, choice: int) -> dict[str, str]:
    """Return a choice's values by option, options in order of their names.

    The values of the last option change fastest.
    """
    chosen: dict[str, str] = {}
    for name in sorted(product.options, reverse=True):
        values = product.options[name]
        choice, at = divmod(choice, len(values))
        chosen[name] = values[at]
    return dict(reversed(chosen.items()))
