"""What a purchase is worth, 0 to 1, as WebShop has it (Yao et al. 2022, arXiv 2207.01206, section
3.1):

score = type * (attributes found + options found + [price within the limit]) / (attributes + options
+ 1)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from rapidfuzz import fuzz, utils

from envs.webshop.catalogue import Product
from envs.webshop.goals import Goal

# two texts are the same if their token set ratio, rounded to whole percents, is above this
ALIKE = 85
SHARED_DEPARTMENTS = 2
# Title scores: the share of the wanted name's nouns that the bought one has.
SAME_TYPE, OTHER_TYPE = 0.2, 0.1
NO_NOUNS = 0.2  # of a wanted name that has none
# The first of these that is in an option's value stands for the value. The order is WebShop's, and
# matters: "light blue" is blue.
COLOUR_NAMES = """
    alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo
    caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream crystal
    dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather indigo ivory
    ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor
    mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand
    sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut
    wheat white wine yellow
"""
COLOURS = tuple(COLOUR_NAMES.split())
LATIN_1_ABOVE_ASCII = dict.fromkeys(range(128, 256))


def score(
    goal: Goal, product: Product, options: Mapping[str, str], *, price: float, title_score: float
) -> float:
    """Of buying `product` for `price` with these values of its options, by name."""
    found = (
        _attributes_found(goal, product)
        + _options_found(goal, options)
        + (price <= goal.price_limit)
    )
    return (
        found
        / (len(goal.attributes) + len(goal.options) + 1)
        * type_score(goal.product, product, title_score=title_score)
    )


def type_score(wanted: Product, bought: Product, *, title_score: float) -> float:
    """1 for the same kind of product, else 0.5, 0.1 or 0."""
    if title_score == 0.0:
        return 0.0
    if title_score < OTHER_TYPE:
        return 0.1
    shared = _departments(wanted.product_category) & _departments(bought.product_category)
    is_same = (
        wanted.query == bought.query or len(shared) >= SHARED_DEPARTMENTS or title_score > SAME_TYPE
    )
    return 1.0 if is_same else 0.5


def title_score(wanted: Sequence[str], bought: Sequence[str]) -> float:
    """Of the nouns of both names."""
    return len(set(wanted) & set(bought)) / len(wanted) if wanted else NO_NOUNS


def are_alike(one: str, other: str) -> bool:
    """thefuzz's token_set_ratio > 85, from the library underneath it."""
    return round(fuzz.token_set_ratio(_plain(one), _plain(other))) > ALIKE


@lru_cache(maxsize=100_000)
def _plain(text: str) -> str:
    return utils.default_process(text.translate(LATIN_1_ABOVE_ASCII))


def _departments(path: str) -> frozenset[str]:
    return frozenset(name.strip() for name in path.split("›"))


def _attributes_found(goal: Goal, product: Product) -> int:
    return sum(
        any(are_alike(theirs, ours) for theirs in product.attributes)
        or _is_mentioned(ours, product)
        for ours in goal.attributes
    )


def _options_found(goal: Goal, options: Mapping[str, str]) -> int:
    chosen = [colour(value) for value in options.values()]
    return sum(
        any(are_alike(ours, wanted) for ours in chosen) for wanted in map(_wanted, goal.options)
    )


def _wanted(option: str | tuple[str, str]) -> str:
    """What a chosen value is compared with.

    Of a synthetic goal WebShop compares the pair of name and value, printed, unless one of the two
    is a colour by itself. So "1877brown", which is "brown" where it is chosen, is not found where
    it is wanted, and such a goal has no score of 1.
    """
    if isinstance(option, str):
        return colour(option)
    return next((one for one in COLOURS if one in option), str(option))


def _is_mentioned(text: str, product: Product) -> bool:
    return any(
        text in where.lower()
        for where in (product.name, " ".join(product.bullets), product.description)
    )


def colour(value: str) -> str:
    return next((colour for colour in COLOURS if colour in value), value)
