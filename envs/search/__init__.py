"""Questions to answer with a search engine, as in Search-R1 and the paper (docs/search.md).

world.py      two environments, and their rules: SearchEnv asks a server, LocalSearchEnv searches by
              itself
questions.py  read questions, and divide them into splits
corpus.py     the passages, and the index over them
client.py     ask a retrieval server that speaks Search-R1's protocol
server.py     be such a server
"""

from envs.search.world import LocalSearchEnv, SearchEnv

__all__ = ["LocalSearchEnv", "SearchEnv"]
