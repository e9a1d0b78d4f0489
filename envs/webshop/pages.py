"""The shop's pages, as the visible texts of WebShop's HTML and the names of what can be clicked on
them.

page = item_page(product)
" [SEP] ".join(page.texts)      # after the instruction, which every page but the last begins with
page.buttons                    # lower case, in the order in which WebShop lists them
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from envs.webshop.catalogue import Product

SEPARATOR = " [SEP] "
HITS, PAGE_HITS = 50, 10  # of a search; of them on a page
BACK_TO_SEARCH, NEXT, PREVIOUS, BUY_NOW = "back to search", "next >", "< prev", "buy now"
DESCRIPTION, FEATURES, REVIEWS = SUB_PAGES = ("description", "features", "reviews")
RATING = "N.A."  # WebShop's data has no reviews, and so no ratings


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    texts: tuple[str, ...]  # what comes after the instruction
    buttons: tuple[str, ...]
    has_search_bar: bool = False


SEARCH_PAGE = Page(texts=("Search",), buttons=("search",), has_search_bar=True)


def results_page(products: Sequence[Product], *, number: int, n_hits: int) -> Page:
    """Number `number` (from 1) of the pages of `n_hits` products, of which it shows these."""
    ways = ("< Prev", "Next >") if number > 1 else ("Next >",)  # also where nothing is next
    shown = [
        text
        for product in products
        for text in visible(product.asin, product.name, price_tag(product))
    ]
    return Page(
        texts=("Back to Search", f"Page {number} (Total results: {n_hits})", *ways, *shown),
        buttons=(
            BACK_TO_SEARCH,
            *(way.lower() for way in ways),
            *(product.asin.lower() for product in products),
        ),
    )


def item_page(product: Product) -> Page:
    options = [text for name, values in product.options.items() for text in (name, *values)]
    about = (product.name, f"Price: {price_tag(product)}", f"Rating: {RATING}")
    values = [value for values in product.options.values() for value in values]
    return Page(
        texts=(
            *visible("Back to Search", "< Prev", *options, *about),
            "Description",
            "Features",
            "Reviews",
            "Buy Now",
        ),
        buttons=tuple(dict.fromkeys((BACK_TO_SEARCH, PREVIOUS, *SUB_PAGES, BUY_NOW, *values))),
    )


def sub_page(product: Product, name: str) -> Page:
    texts = {DESCRIPTION: (product.description,), FEATURES: product.bullets, REVIEWS: ()}[name]
    return Page(
        texts=("Back to Search", "< Prev", *visible(*texts)), buttons=(BACK_TO_SEARCH, PREVIOUS)
    )


def done_page(product: Product, options: Mapping[str, str], *, score: float) -> Page:
    """It has no instruction. Most of it is WebShop's form for crowd workers, empty."""
    chosen = json.dumps(options, sort_keys=True)
    for sign in "<>&'":
        chosen = chosen.replace(sign, f"\\u{ord(sign):04x}")
    bought = (
        "asin",
        product.asin,
        "options",
        chosen,
        "attrs",
        "None",
        "category",
        "None",
        "query",
        "None",
    )
    wanted = (
        "asin",
        "options",
        "attrs",
        "price upper",
        "instuction text",
        "category",
        "product category",
        "query",
    )
    return Page(
        texts=(
            *(
                "Thank you for shopping with us!",
                "Your code:",
                "None",
                "(Paste it in your MTurk interface.)",
            ),
            *(
                "Purchased",
                *bought,
                "product category",
                "None",
                "Target",
                *wanted,
                "Goal",
                "None",
                "Reward",
            ),
            *("Your score (min 0.0, max 1.0)", str(score), "Reward Details", "None"),
        ),
        buttons=(),
    )


def price_tag(product: Product) -> str:
    return " to ".join(f"${price}" for price in product.prices)


def visible(*texts: str) -> list[str]:
    """What is left of texts that stand alone in an HTML element: an empty one, or an empty line, is
    not there.
    """
    return [
        text.strip()
        for text in texts
        if text and (text.strip(string.whitespace) or "\n" not in text)
    ]
