"""Make the shop's pages: the visible texts of WebShop's HTML, and the names of its buttons.

page = item_page(product)
" [SEP] ".join(page.texts)  # every page but the last begins with the instruction before them
page.buttons                # lower case, in WebShop's order
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from envs.webshop.catalogue import Product

SEPARATOR = " [SEP] "
MAX_HITS, PAGE_HITS = 50, 10  # of a search, and on one page of it
BACK_TO_SEARCH, NEXT, PREVIOUS, BUY_NOW = "back to search", "next >", "< prev", "buy now"
DESCRIPTION, FEATURES, REVIEWS = SUB_PAGES = ("description", "features", "reviews")
RATING = "N.A."  # WebShop's data has no reviews, and so no ratings


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    texts: tuple[str, ...]  # after the instruction
    buttons: tuple[str, ...]
    has_search_bar: bool = False


SEARCH_PAGE = Page(texts=("Search",), buttons=("search",), has_search_bar=True)


def results_page(products: Sequence[Product], *, number: int, n_hits: int) -> Page:
    """Return a page of a search with `n_hits` hits. Pages are numbered from 1."""
    ways = ("< Prev", "Next >") if number > 1 else ("Next >",)  # "Next >" also on the last page
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
    """Return the last page: mostly WebShop's form for crowd workers, empty."""
    chosen = json.dumps(options, sort_keys=True)
    for sign in "<>&'":
        chosen = chosen.replace(sign, f"\\u{ord(sign):04x}")
    bought = ("asin", product.asin, "options", chosen)
    unknown = ("attrs", "None", "category", "None", "query", "None", "product category", "None")
    wanted = ("asin", "options", "attrs", "price upper", "instuction text")  # WebShop's spelling
    thanks = ("Thank you for shopping with us!", "Your code:", "None")
    texts = (
        *thanks,
        "(Paste it in your MTurk interface.)",
        "Purchased",
        *bought,
        *unknown,
        "Target",
        *wanted,
        *("category", "product category", "query"),
        *("Goal", "None", "Reward"),
        *("Your score (min 0.0, max 1.0)", str(score), "Reward Details", "None"),
    )
    return Page(texts=texts, buttons=())


def price_tag(product: Product) -> str:
    return " to ".join(f"${price}" for price in product.prices)


def visible(*texts: str) -> list[str]:
    """Return the texts that an HTML page shows of elements with these texts.

    An empty element is not shown, and neither is an empty line.
    """
    return [
        text.strip()
        for text in texts
        if text and (text.strip(string.whitespace) or "\n" not in text)
    ]
