"""Read the products of WebShop's own files, cleaned as WebShop cleans them.

    catalogue = open_catalogue(Path("data"), "small")  # 1,000 products, parsed in 0.1 s
    catalogue[17].name

The full catalogue (1.18 million products) is too much to parse in every process. `python -m
envs.webshop pack` writes it once as lines of JSON and arrays, which are mapped: all processes of a
machine share one copy in memory.
"""

from __future__ import annotations

import json
import lzma
import math
import mmap
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

SMALL, FULL = "small", "full"
FILES = {
    SMALL: ("items_shuffle_1000.json", "items_ins_v2_1000.json"),
    FULL: ("items_shuffle.json", "items_ins_v2.json"),
}
# instructions by crowd workers: for all products, or for the small catalogue
HUMAN_FILES = ("items_human_ins.json", "items_human_ins_13.json")
DEFAULT_PRICE = 100.0  # dollars, of a product without a price
MAX_ASIN_CHARACTERS = 10  # of Amazon's product numbers
KEPT_PRODUCTS = 10_000  # parsed products that a process keeps
COLUMNS = ("starts", "low", "high", "asks", "n_synthetic", "n_human")


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    text: str
    attributes: tuple[str, ...]
    # chosen by a crowd worker; a synthetic instruction is combined with each choice of options
    options: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    asin: str
    name: str
    description: str
    bullets: tuple[str, ...]
    prices: tuple[float, ...]  # one, or the ends of a range; dollars
    options: dict[str, tuple[str, ...]]  # values by name, in the order of the page
    attributes: tuple[str, ...]
    category: str  # one of five
    query: str  # the search that found it when the catalogue was collected
    product_category: str  # path through the departments
    synthetic: Instruction | None
    human: tuple[Instruction, ...]

    @property
    def contents(self) -> str:
        """Return the text that is searched."""
        options = ", and ".join(
            f"{name}: {', '.join(values)}" for name, values in self.options.items()
        )
        return " ".join([self.name, self.description, self.bullets[0], options]).lower()


class Catalogue(Sequence[Product]):
    """R products by number, and columns from which goals are made without parsing a product."""

    def __init__(self, lines: bytes | mmap.mmap, columns: dict[str, np.ndarray]) -> None:
        self._lines, self._columns = lines, columns
        self._starts = columns["starts"]  # int64, R + 1 offsets in `lines`
        # float64, dollars; high is NaN if the price is no range
        self.low_R, self.high_R = columns["low"], columns["high"]
        self.asks_R = columns["asks"]  # int64, 1 if there is a synthetic instruction
        # int64, numbers of goals
        self.n_synthetic_R, self.n_human_R = columns["n_synthetic"], columns["n_human"]
        self._product = lru_cache(maxsize=KEPT_PRODUCTS)(self._parse)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number):  # type: ignore[no-untyped-def]  # Sequence also has slices
        if not 0 <= number < len(self):
            raise IndexError(f"there are {len(self)} products, none has number {number}")
        return self._product(number)

    def _parse(self, number: int) -> Product:
        fields = json.loads(self._lines[self._starts[number] : self._starts[number + 1]])
        return _product_of(fields)

    def save(self, directory: Path) -> None:
        (directory / "products.jsonl").write_bytes(self._lines)
        for name, column in self._columns.items():
            np.save(directory / f"{name}.npy", column)


def read(data: Path, which: str) -> Catalogue:
    """Parse WebShop's files. Raises ValueError if one is missing.

    The file with crowd workers' instructions is optional.
    """
    items, attributes = (_load(data, (name,), which) for name in FILES[which])
    has_human = any(_find(data, name) for name in HUMAN_FILES)
    human = _load(data, HUMAN_FILES, which) if has_human else {}
    return _of_products(_cleaned(items, attributes, human))


@cache
def open_catalogue(data: Path, which: str) -> Catalogue:
    """Parse or map a catalogue once per process. Raises ValueError if its files are missing."""
    if which == SMALL:
        return read(data, which)
    directory = packed_folder(data)
    if not directory.is_dir():
        raise ValueError(
            f"webshop catalogue={which!r}: no {directory}; make it with: python -P -m envs.webshop "
            f"pack {data}"
        )
    with open(directory / "products.jsonl", "rb") as file:
        lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return Catalogue(
        lines, {name: np.load(directory / f"{name}.npy", mmap_mode="r") for name in COLUMNS}
    )


def packed_folder(data: Path) -> Path:
    """Return the folder in which `python -P -m envs.webshop pack` writes the full catalogue."""
    return data / "packed"


def _of_products(products: Iterable[Product]) -> Catalogue:
    lines = bytearray()
    columns: dict[str, Any] = {name: array("q") for name in COLUMNS}
    columns |= {"starts": array("q", [0]), "low": array("d"), "high": array("d")}
    for product in products:
        n_choices = math.prod(len(values) for values in product.options.values())
        lines += json.dumps(asdict(product), ensure_ascii=False).encode() + b"\n"
        columns["starts"].append(len(lines))
        columns["low"].append(product.prices[0])
        columns["high"].append(product.prices[1] if len(product.prices) == 2 else math.nan)
        columns["asks"].append(product.synthetic is not None)
        columns["n_synthetic"].append(n_choices if product.synthetic else 0)
        columns["n_human"].append(len(product.human))
    return Catalogue(bytes(lines), {name: np.array(columns[name]) for name in COLUMNS})


def _find(data: Path, name: str) -> Path | None:
    return next((path for path in (data / name, data / f"{name}.xz") if path.is_file()), None)


def _load(data: Path, names: Sequence[str], which: str) -> Any:
    """Return the content of the first of these files that is there. Raises ValueError."""
    for name in names:
        path = _find(data, name)
        if path is not None:
            raw = path.read_bytes()
            return json.loads(lzma.decompress(raw) if path.suffix == ".xz" else raw)
    raise ValueError(
        f"webshop catalogue={which!r}: no file {names[0]!r} in data={str(data)!r}; docs/webshop.md "
        "says where the files are from"
    )


def _cleaned(
    items: list[dict[str, Any]], attributes: dict[str, Any], human: dict[str, Any]
) -> Iterator[Product]:
    seen: set[str] = set()
    for item in items:
        asin = item["asin"]
        if asin == "nan" or len(asin) > MAX_ASIN_CHARACTERS or asin in seen:
            continue
        seen.add(asin)
        described = attributes.get(asin, {})
        bullets = item["small_description"]
        yield Product(
            asin=asin,
            name=item["name"],
            description=item["full_description"],
            bullets=tuple(bullets) if isinstance(bullets, list) else (bullets,),
            prices=_prices(item.get("pricing")),
            options=_options(item["customization_options"]),
            attributes=tuple(described.get("attributes", ("DUMMY_ATTR",))),
            category=item["category"],
            query=item["query"].lower().strip(),
            product_category=item["product_category"],
            synthetic=_synthetic(described),
            human=tuple(_human(human.get(asin, ()))),
        )


def _prices(text: str | None) -> tuple[float, ...]:
    """Return (19.99, 27.99) for "$19.99$27.99". Like WebShop, ignore a third price."""
    if not text:
        return (DEFAULT_PRICE,)
    return tuple(float(re.sub(r"[^\d.]", "", price)) for price in text.split("$")[1:])[:2]


def _options(listed: Any) -> dict[str, tuple[str, ...]]:
    options = {}
    for name, contents in (listed or {}).items():
        if contents is not None:
            values = [content["value"].strip().replace("/", " | ") for content in contents]
            options[name.lower()] = tuple(map(str.lower, values))
    return options


def _synthetic(described: dict[str, Any]) -> Instruction | None:
    text = described.get("instruction")
    if text is None:
        return None
    return Instruction(text=text, attributes=tuple(described["instruction_attributes"]), options=())


def _human(listed: Iterable[dict[str, Any]]) -> Iterator[Instruction]:
    for fields in listed:
        if fields["instruction_attributes"]:  # WebShop leaves out the others
            yield Instruction(
                text=fields["instruction"].strip("."),
                attributes=tuple(fields["instruction_attributes"]),
                options=tuple(fields["instruction_options"]),
            )


def _product_of(fields: dict[str, Any]) -> Product:
    for name in ("bullets", "prices", "attributes"):
        fields[name] = tuple(fields[name])
    fields["options"] = {name: tuple(values) for name, values in fields["options"].items()}
    fields["human"] = tuple(map(_instruction_of, fields["human"]))
    fields["synthetic"] = _instruction_of(fields["synthetic"]) if fields["synthetic"] else None
    return Product(**fields)


def _instruction_of(fields: dict[str, Any]) -> Instruction:
    return Instruction(
        text=fields["text"],
        attributes=tuple(fields["attributes"]),
        options=tuple(fields["options"]),
    )
