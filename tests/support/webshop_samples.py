"""A shop of six products, in the layout of WebShop's files; small enough to work out what it
answers by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ALL = {
    "catalogue": "small",
    "instructions": "synthetic",
    "heldout": "test",
    "train_tasks": 0,
    "heldout_tasks": 0,
    "seed": 0,
    "observation": "whole",
}
DEPARTMENTS = "Home › Lamps › Table Lamps"


def item(asin: str, name: str, **fields: Any) -> dict[str, Any]:
    return {
        "asin": asin,
        "name": name,
        "full_description": "",
        "small_description": [""],
        "pricing": "$15.0",
        "customization_options": "",
        "category": "garden",
        "query": "Lamps ",
        "product_category": DEPARTMENTS,
        **fields,
    }


def choices(*values: str) -> list[dict[str, str]]:
    return [{"value": value} for value in values]


LAMP = item(
    "B000000001",
    "Acme Lamp",
    full_description="A lamp for the desk.",
    small_description=["Bright ", " ", "Brass foot"],
    pricing="$19.99$27.99$99.0",
    customization_options={
        "Size": choices("Small", "Large/Tall"),
        "Color": choices("Dark Red", "1877Brown"),
        "Plug": None,
    },
)
ITEMS = [
    LAMP,
    item("B000000002", "Acme Lamp Shade", small_description="One text", pricing=""),
    item(
        "B000000003",
        "Tea Kettle",
        category="grocery",
        query="kettles",
        product_category="Kitchen › Kettles",
    ),
    item("nan", "Without a number"),
    item("B000000001", "A second of the first"),
    item("B0000000042", "Too long a number"),
]
INSTRUCTIONS: dict[str, dict[str, Any]] = {
    "B000000001": {
        "attributes": ["desk lamp", "brass"],
        "instruction": "Find me desk lamp",
        "instruction_attributes": ["desk lamp"],
    },
    "B000000002": {"attributes": ["easy clean"]},
}
HUMAN = {
    "B000000002": [
        {
            "instruction": "i want a shade.",
            "instruction_attributes": ["easy clean"],
            "instruction_options": ["dark red"],
        },
        {"instruction": "i want nothing", "instruction_attributes": [], "instruction_options": []},
    ]
}


def write_shop(
    folder: Path, *, suffix: str = "_1000", items: list[dict[str, Any]] = ITEMS
) -> dict[str, object]:
    """The files, and options that play in them."""
    folder.mkdir(exist_ok=True)
    (folder / f"items_shuffle{suffix}.json").write_text(json.dumps(items))
    (folder / f"items_ins_v2{suffix}.json").write_text(json.dumps(INSTRUCTIONS))
    (folder / "items_human_ins.json").write_text(json.dumps(HUMAN))
    return {**ALL, "data": str(folder)}
