"""What takes long, beforehand: `python -m envs.webshop pack DATA`, `... nouns DATA CATALOGUE MODEL`
(docs/webshop.md).
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from envs import bm25
from envs.webshop import nouns
from envs.webshop.catalogue import FULL, SMALL, read
from envs.webshop.shop import catalogue_of, packed
from printable import ArgumentParser, fail, printable


def pack(data: Path) -> str:
    """Makes of the full catalogue what can be mapped; whole or not at all. It has to fit into
    memory for this once.
    """
    catalogue = read(data, FULL)
    scratch = packed(data).with_name(f"tmp-packed-{os.getpid()}")
    scratch.mkdir()
    try:
        catalogue.save(scratch)
        bm25.save(
            bm25.build(
                (product.contents for product in catalogue), [product.asin for product in catalogue]
            ),
            scratch,
        )
        shutil.rmtree(packed(data), ignore_errors=True)
        scratch.rename(packed(data))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return f"{len(catalogue)} products in {packed(data)}"


def tag(data: Path, which: str, model: str) -> str:
    catalogue = catalogue_of(data, which)
    tagged = nouns.tag((product.name for product in catalogue), model)
    tagged.save(data / nouns.TAGGED)
    return f"{len(tagged.keys_N)} names in {data / nouns.TAGGED}"


def main() -> int:
    parser = ArgumentParser(prog="python -m envs.webshop", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (
        ("pack", "arrays of the full catalogue, to play with it"),
        ("nouns", "spaCy's nouns of all names"),
    ):
        command = commands.add_parser(name, help=what)
        command.add_argument("data", type=Path, help="the folder with WebShop's files")
    commands.choices["nouns"].add_argument("catalogue", choices=(SMALL, FULL))
    commands.choices["nouns"].add_argument(
        "model", help="a spaCy model that is installed, such as en_core_web_sm"
    )
    options = parser.parse_args()
    try:
        said = (
            pack(options.data)
            if options.command == "pack"
            else tag(options.data, options.catalogue, options.model)
        )
        print(printable(said))
    except (ValueError, ImportError, OSError) as error:
        fail(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
