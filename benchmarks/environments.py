"""Measure the steps per second of every environment, beside the original where it can run.

    python benchmarks/environments.py [--quick] [--data FOLDER] [--only ENVIRONMENT ...]

FOLDER has `alfworld/`, `webshop/` and `qa/`; the default is GIGPO_DATA, or `data`.
`support/env_*.py` say what is measured:

    alfworld  steps beside the stock engine on the same commands; memory over many episodes
    webshop   steps of one core, start-up, equality with recorded episodes of the original
    search    index, queries, server, both environments; recall with the question as only search
    gym       Sokoban; FrozenLake and Taxi through the adapter and without it
    cache     a step of the quick start without remembered answers, with them, and with kept ones

An environment without its data or package is named and left out. The last line is JSON.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support.figures import quick_parser, show_json, show_table

# the folder of data that each one needs
NEEDED_DATA = {"alfworld": None, "webshop": "webshop", "search": "qa", "gym": None, "cache": None}
OPTIONAL_PACKAGES = ("alfworld", "fast_downward")
REQUIRED = {
    "alfworld_over_stock": ">= 10",
    "webshop_steps_s": ">= 2000",
    "webshop_over_original": ">= 100",
    "webshop_start_s": "< 2",
    "webshop_equal_steps": "1",
    "webshop_equal_rewards": ">= 0.99",
    "webshop_equal_first_pages": ">= 0.98",
    "textworld_cached_ms_a_step": "<= 0.3",
    "textworld_uncached_over_cached": ">= 5",
    "textworld_kept_ms_a_step": "<= 0.2",
}


def measure(world: str, *, quick: bool, data: Path) -> dict[str, float]:
    """Return the figures of an environment; none if its data or package is missing."""
    folder = NEEDED_DATA[world]
    if folder is not None and not (data / folder).is_dir():
        print(f"{world}: left out, as there is no {data / folder}; give --data or GIGPO_DATA")
        return {}
    try:
        module = importlib.import_module(f"support.env_{world}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in OPTIONAL_PACKAGES:
            raise
        print(f"{world}: left out, as {error.name} is not installed; pip install -e '.[alfworld]'")
        return {}
    figures: dict[str, float] = module.measure(quick=quick, data=data)
    return figures


def main() -> None:
    parser = quick_parser(__doc__, quick="under a minute")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("GIGPO_DATA", "data")))
    parser.add_argument("--only", nargs="+", choices=list(NEEDED_DATA), default=list(NEEDED_DATA))
    options = parser.parse_args()
    figures: dict[str, float] = {}
    for world in options.only:
        found = measure(world, quick=options.quick, data=options.data)
        show_table(found, REQUIRED)
        figures |= found
    show_json(figures, figures)


if __name__ == "__main__":
    main()
