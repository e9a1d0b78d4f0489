"""Every environment's steps a second, beside the original where it can run.

    python benchmarks/environments.py [--quick] [--data FOLDER] [--only WORLD ...]

FOLDER has `alfworld/`, `webshop/` and `qa/`; GIGPO_DATA, or `data`, unless given. What is measured
is said in support/env_*.py:

alfworld  beside the stock engine on the same commands; memory over many episodes (without data:
games made on the spot)
webshop   of one core, start-up, and what equals recorded episodes of the original
search    index, queries, the server, the two worlds under our pool; recall of the question as the
only search
gym       Sokoban; FrozenLake and Taxi through the adapter and without it

A world whose data or package is not there is named and left out. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# the folder of data that each cannot do without
WORLDS = {"alfworld": None, "webshop": "webshop", "search": "qa", "gym": None}
OPTIONAL = ("alfworld", "fast_downward")  # packages of the extra
REQUIRED = {
    "alfworld_over_stock": ">= 10",
    "webshop_steps_s": ">= 2000",
    "webshop_over_original": ">= 100",
    "webshop_start_s": "< 2",
    "webshop_equal_steps": "1",
    "webshop_equal_rewards": ">= 0.99",
    "webshop_equal_first_pages": ">= 0.98",
}


def measured(world: str, *, quick: bool, data: Path) -> dict[str, float]:
    folder = WORLDS[world]
    if folder is not None and not (data / folder).is_dir():
        print(f"{world}: left out, as there is no {data / folder}; give --data or GIGPO_DATA")
        return {}
    try:
        module = importlib.import_module(f"support.env_{world}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in OPTIONAL:
            raise
        print(f"{world}: left out, as {error.name} is not installed; pip install -e '.[alfworld]'")
        return {}
    figures: dict[str, float] = module.measure(quick=quick, data=data)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("GIGPO_DATA", "data")))
    parser.add_argument("--only", nargs="+", choices=list(WORLDS), default=list(WORLDS))
    options = parser.parse_args()
    figures: dict[str, float] = {}
    for world in options.only:
        found = measured(world, quick=options.quick, data=options.data)
        for name, value in found.items():
            required = f"   required {REQUIRED[name]}" if name in REQUIRED else ""
            print(f"{name:36} {value:12,.3f}{required}", flush=True)
        figures |= found
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
