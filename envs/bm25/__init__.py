"""What Lucene 9 answers, through Anserini: its BM25 (k1 0.9, b 0.4) and its English analyser.
Without Java.

It is the search of WebShop, and the one that Search-R1's server has for words (Pyserini).

    index = build(contents)                                  # once; arrays only, so it can be kept and shared by processes
    search(index, "red shoes", limit=50)                     # document numbers, best first
    search_scored(index, "red shoes", limit=50)              # (number, score)
"""

from envs.bm25.index import Index, build, load, save, search, search_scored, tokens

__all__ = ["Index", "build", "load", "save", "search", "search_scored", "tokens"]
