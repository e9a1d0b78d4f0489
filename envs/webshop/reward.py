"""Score a purchase from 0 to 1, as in WebShop (Yao et al. 2022, arXiv 2207.01206, section 3.1):

score = type * (attributes found + options found + [price within the limit])
             / (attributes + options + 1)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from rapidfuzz import fuzz, utils

from envs.webshop.catalogue import Product
from envs.webshop.goals import Goal

# All numbers are those of WebShop's own code. With others, scores could not be compared with
# published ones.
MATCH_PERCENT = 85  # two texts match if their rounded token set ratio is above this
# The type score is 1 for products of one kind: found by the same query, with this many departments
# in common, or with a title score above SAME_TYPE. The title score is the share of the wanted
# name's nouns that the bought name has.
SHARED_DEPARTMENTS = 2
SAME_TYPE = 0.2
NO_NOUNS = (
    0.2  # title score for a wanted name without nouns: not above SAME_TYPE, so it decides nothing
)
OTHER_KIND = 0.5  # type score of another kind
OTHER_TYPE = 0.1  # below this title score, products are barely related, whatever else they share
BARELY_RELATED = 0.1  # type score then; without a noun in common it is 0
# The first of these colours that occurs in an option's value replaces the value. The order is
# WebShop's, and matters: "light blue" is blue.
COLOUR_NAMES = """
    alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown
    burgundy camel camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee
    cognac copper coral cranberry cream crystal dark denim eggplant elephant espresso fuchsia
    gold granite grape graphite grass gray green grey heather indigo ivory ivy khaki lavender
    lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor
    mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red
    rose royal rust sand sapphire seashell silver skull slate steel stone stonewash sunflower
    tan taupe teal tiger turquoise violet walnut wheat white wine yellow
"""
COLOURS = tuple(COLOUR_NAMES.split())
LATIN_1_ABOVE_ASCII = dict.fromkeys(range(128, 256))


def score(
    goal: Goal, product: Product, options: Mapping[str, str], *, price: float, title_score: float
) -> float:
    """Return the score of buying `product` for `price` with these option values, by name."""
    found = _attributes_found(goal, product) + _options_found(goal, options)
    found += price <= goal.price_limit
    asked = len(goal.attributes) + len(goal.options) + 1
    return found / asked * type_score(goal.product, product, title_score=title_score)


def type_score(wanted: Product, bought: Product, *, title_score: float) -> float:
    """Return 1 for the same kind of product, 0.5 for another, 0.1 or 0 for a barely related one."""
    if title_score == 0.0:
        return 0.0
    if title_score < OTHER_TYPE:
        return BARELY_RELATED
    shared = _departments(wanted.product_category) & _departments(bought.product_category)
    is_same = (
        wanted.query == bought.query or len(shared) >= SHARED_DEPARTMENTS or title_score > SAME_TYPE
    )
    return 1.0 if is_same else OTHER_KIND


def title_score(wanted: Sequence[str], bought: Sequence[str]) -> float:
    """Return the share of the wanted name's nouns that the bought name has."""
    return len(set(wanted) & set(bought)) / len(wanted) if wanted else NO_NOUNS


def is_similar(one: str, other: str) -> bool:
    """Return whether thefuzz's token_set_ratio is above 85, from the library underneath it."""
    return round(fuzz.token_set_ratio(_plain(one), _plain(other))) > MATCH_PERCENT


@lru_cache(maxsize=100_000)
def _plain(text: str) -> str:
    return utils.default_process(text.translate(LATIN_1_ABOVE_ASCII))


def _departments(path: str) -> frozenset[str]:
    return frozenset(name.strip() for name in path.split("›"))


def _attributes_found(goal: Goal, product: Product) -> int:
    texts = (product.name, " ".join(product.bullets), product.description)
    text = "\n".join(texts).lower()
    n_found = 0
    for wanted in goal.attributes:
        is_listed = any(is_similar(theirs, wanted) for theirs in product.attributes)
        n_found += is_listed or wanted in text
    return n_found


def _options_found(goal: Goal, options: Mapping[str, str]) -> int:
    chosen = [colour(value) for value in options.values()]
    n_found = 0
    for option in goal.options:
        wanted = _wanted(option)
        n_found += any(is_similar(value, wanted) for value in chosen)
    return n_found


def _wanted(option: str | tuple[str, str]) -> str:
    """Return the text with which chosen values are compared.

    For a synthetic goal, WebShop compares the printed pair of name and value, unless one of the two
    is exactly a colour. So a wanted "1877brown" never matches the chosen one, which becomes
    "brown", and such a goal cannot reach a score of 1.
    """
    if isinstance(option, str):
        return colour(option)
    return next((one for one in COLOURS if one in option), str(option))


def colour(value: str) -> str:
    """Return the first colour that occurs in an option's value, else the value."""
    return next((colour for colour in COLOURS if colour in value), value)
