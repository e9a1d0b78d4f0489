"""Prepare WebShop's data once, where that takes long (docs/webshop.md).

python -P -m envs.webshop pack DATA
python -P -m envs.webshop nouns DATA CATALOGUE MODEL
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from envs import bm25
from envs.webshop import nouns
from envs.webshop.catalogue import FULL, SMALL, open_catalogue, packed_folder, read
from printable import ArgumentParser, fail, printable


def pack(data: Path) -> str:
    """Write the full catalogue and its index as files to map. Return a report.

    It needs memory for the whole catalogue. The folder appears complete or not at all.
    """
    catalogue, target = read(data, FULL), packed_folder(data)
    scratch = target.with_name(f"tmp-packed-{os.getpid()}")
    scratch.mkdir()
    try:
        catalogue.save(scratch)
        names = [product.asin for product in catalogue]
        bm25.save(bm25.build((product.contents for product in catalogue), names), scratch)
        shutil.rmtree(target, ignore_errors=True)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return f"{len(catalogue)} products in {target}"


def tag(data: Path, which: str, model: str) -> str:
    """Write the nouns of all names, tagged by a spaCy model. Return a report."""
    catalogue, target = open_catalogue(data, which), data / nouns.TAGGED
    tagged = nouns.tag((product.name for product in catalogue), model)
    tagged.save(target)
    return f"{len(tagged.keys_R)} names in {target}"


def main() -> int:
    parser = ArgumentParser(
        prog="python -P -m envs.webshop",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="prepare the full catalogue for play")
    tagging = commands.add_parser("nouns", help="tag the nouns of all names with spaCy")
    for command in (packing, tagging):
        command.add_argument("data", type=Path, help="folder with WebShop's files")
    tagging.add_argument("catalogue", choices=(SMALL, FULL))
    tagging.add_argument("model", help="an installed spaCy model, such as en_core_web_sm")
    options = parser.parse_args()
    try:
        if options.command == "pack":
            report = pack(options.data)
        else:
            report = tag(options.data, options.catalogue, options.model)
        print(printable(report))
    except (ValueError, ImportError, OSError) as error:
        fail(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
