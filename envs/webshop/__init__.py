"""WebShop (Yao et al. 2022) without its HTML, Java and spaCy (docs/webshop.md).

    world.py      the environment, and the shop that all environments of a process share
    catalogue.py  products, from WebShop's files
    goals.py      instructions, prices and splits
    pages.py      texts and buttons
    reward.py     the score of a purchase
    nouns.py      the nouns of product names, for the score
    __main__.py   slow preparations, done once

The search is Lucene's BM25 (`envs/bm25.py`).
"""

from envs.webshop.world import WebShopEnv

__all__ = ["WebShopEnv"]
