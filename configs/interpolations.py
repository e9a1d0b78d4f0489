"""Bound the values that a config's interpolations stand for, before OmegaConf resolves them.

    check_forms(text)          # of every scalar of a YAML text
    check_expansion(settings)  # of a file, and of files that build on each other

`a: ${b}${b}` doubles b. A chain of 28 such lines stands for gigabytes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

MAX_EXPANDED = 2**20  # characters that all settings of a config stand for
COST = 100  # characters that resolving one interpolation counts for: 0.1 ms
MAX_LEVELS = 8  # of values that stand for values that stand for others
# It begins at the first of several backslashes only: from each of a million it would be searched
# to the end again.
BEGINNING = re.compile(r"(?<!\\)(\\*)\$\{")
# ${a.b}, ${.b} (beside this setting), ${oc.env:NAME}, ${oc.decode:${oc.env:NAME}}
FORM = re.compile(
    r"\$\{\s*(?:(?P<key>\.*\w[\w-]*(?:\.\w[\w-]*|\[\w[\w-]*\])*)"
    r"|oc\.env:[^{}]*|oc\.decode:\s*\$\{\s*oc\.env:[^{}]*\}\s*)\}"
)
# OmegaConf also takes -1, 00, 1_0 and the digits of other scripts, as Python's int does.
INDEX = re.compile(r"0|[1-9][0-9]*")

Path = tuple[str, ...]


def check_forms(text: str) -> None:
    """Raise ValueError for an interpolation whose size cannot be told beforehand."""
    for _ in _references(text):
        pass


def _references(text: str) -> Iterator[str]:
    """Yield the key of each interpolation, "" for a variable of the environment."""
    for match in BEGINNING.finditer(text):
        if len(match[1]) % 2:  # escaped
            continue
        found = FORM.match(text, match.end() - 2)
        if found is None:
            raise ValueError(
                f"{text[match.end() - 2 :]!r:.80} stands for another value in a way that is not "
                "known; write ${section.setting} or ${oc.env:NAME}"
            )
        yield found["key"] or ""


def check_expansion(settings: DictConfig) -> None:
    """Raise ValueError if the settings stand for more than MAX_EXPANDED characters."""
    _Expansion(_named(OmegaConf.to_container(settings, resolve=False))).measure(())


def _named(value: object) -> object:
    """Return the value with every key as a text. Raises ValueError for two keys with one text."""
    if isinstance(value, list):
        return [_named(one) for one in value]
    if not isinstance(value, dict):
        return value
    named = {str(name): _named(one) for name, one in value.items()}
    if len(named) < len(value):
        ((twice, _),) = Counter(str(name) for name in value).most_common(1)
        raise ValueError(f"two of its keys read {twice!r:.80}; give each value a key of its own")
    return named


def _inside(value: object, name: str) -> object:
    """Return the value at a key of a mapping or an index of a list, None where there is none.

    Raises ValueError for an index that is not written as 0, 1, 2 and so on.
    """
    if isinstance(value, dict):
        return value.get(name)
    if not isinstance(value, list):
        return None
    if not INDEX.fullmatch(name):
        raise ValueError(f"{name!r:.80} is no index of a list; count from 0, as ${{list.0}} does")
    # int() of very many digits is refused by Python
    return value[int(name)] if len(name) < 10 and int(name) < len(value) else None


class _Expansion:
    """The sizes of the values in a tree of settings, with what they refer to."""

    def __init__(self, tree: object) -> None:
        self._tree = tree
        self._measured: dict[Path, tuple[int, int]] = {}

    def measure(self, path: Path, *, n_above: int = 0) -> tuple[int, int]:
        """Return the size of the value at a path, and the levels of interpolations in it.

        Raises ValueError if one of them is too large. `n_above` levels led to this value.
        """
        if path not in self._measured and n_above <= MAX_LEVELS:
            self._measured[path] = self._of_value(path, n_above=n_above)
        size, n_levels = self._measured.get(path, (0, 0))
        if n_levels + n_above > MAX_LEVELS:
            raise ValueError(f"more than {MAX_LEVELS} values stand for one another, one by one")
        if size > MAX_EXPANDED:
            raise ValueError(
                f"{'.'.join(path) or 'it'} stands for more than {MAX_EXPANDED:,} characters"
            )
        return size, n_levels

    def _of_value(self, path: Path, *, n_above: int) -> tuple[int, int]:
        value = self._at(path)
        if isinstance(value, dict | list):
            names = value if isinstance(value, dict) else map(str, range(len(value)))
            found = [self.measure((*path, name), n_above=n_above) for name in names]
            own, n_levels = 1, 0
        else:
            text = value if isinstance(value, str) else ""
            keys = list(_references(text))
            targets = [self._target(path, key) for key in keys if key]
            found = [self.measure(target, n_above=n_above + 1) for target in targets]
            own, n_levels = 1 + len(text) + COST * len(keys), int(bool(keys))
        return own + sum(size for size, _ in found), n_levels + max(
            (n for _, n in found), default=0
        )

    def _target(self, path: Path, key: str) -> Path:
        """Return the path that an interpolation at `path` refers to.

        A path through a value that is an interpolation itself ends at that value.
        """
        name = key.lstrip(".")
        n_dots = len(key) - len(name)
        parts = tuple(part for part in re.split(r"[.\[\]]+", name) if part)
        whole = (*path[: max(0, len(path) - n_dots)], *parts) if n_dots else parts
        value: object = self._tree
        for number, part in enumerate(whole):
            if not isinstance(value, dict | list):
                return whole[:number]
            value = _inside(value, part)
        return whole

    def _at(self, path: Path) -> object:
        value: object = self._tree
        for name in path:
            value = _inside(value, name)
        return value
