"""BM25 over a corpus, in memory (Tantivy: k1 1.2, b 0.75, English stems)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from envs.search.passages import Passage

WORD = re.compile(r"\w+")
WRITER_BYTES = 1 << 30  # of text until a new segment begins; with one segment equal scores come in the corpus's order


def bm25_index(passages: Sequence[Passage]) -> Callable[[Sequence[str], int], list[list[tuple[str, float]]]]:
    """An `Index` (library.py). Every word of title and text counts; a query without a known word finds nothing."""
    import tantivy  # here, as a world that asks a server needs none

    schema = tantivy.SchemaBuilder()
    schema.add_unsigned_field("row", stored=True)
    schema.add_text_field("contents", tokenizer_name="en_stem")
    index = tantivy.Index(schema.build())
    writer = index.writer(WRITER_BYTES, 1)
    for row, passage in enumerate(passages):
        writer.add_document(tantivy.Document(row=row, contents=passage.contents))
    writer.commit()
    writer.wait_merging_threads()
    index.reload()
    searcher = index.searcher()

    def search(query: str, topk: int) -> list[tuple[str, float]]:
        words = " ".join(WORD.findall(query)).lower()  # nothing that is an operator of the engine's own language
        if not words:
            return []
        hits = searcher.search(index.parse_query(words, ["contents"]), topk).hits
        return [(passages[searcher.doc(address)["row"][0]].id, score) for score, address in hits]

    return lambda queries, topk: [search(query, topk) for query in queries]
