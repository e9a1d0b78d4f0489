"""Questions that are answered with a search engine, as in Search-R1 and the paper's
question-answering runs (docs/search.md).

`world.py` has the world twice: one that waits for a retrieval server and one that searches a corpus
by itself. `episode.py` is what they share, `questions.py` reads what is asked and says what is held
out, `scoring.py` reads a reply and compares an answer with the golden ones. `client.py` asks a
server that speaks Search-R1's protocol, `server.py` is one. A corpus (`passages.py`) with an index
over it is a `library.py`; the index is BM25 (`envs/bm25.py`) or anybody's.
"""

from envs.search.world import LocalSearchEnv, SearchEnv

__all__ = ["LocalSearchEnv", "SearchEnv"]
