"""WebShop (Yao et al. 2022) without its HTML, Java and spaCy. docs/webshop.md has the data, the
options and the rules.

`world.py`: the environment. `shop.py`: what all of a process share. `catalogue.py`: products, from
WebShop's files. `goals.py`: instructions, prices, splits. `pages.py`: texts and buttons.
`reward.py`: the score, `nouns.py`: the nouns of names, for it. `__main__.py`: what takes long,
beforehand. The search is Lucene's BM25 (`envs/bm25.py`).
"""

from envs.webshop.world import WebShopEnv

__all__ = ["WebShopEnv"]
