"""Simulate a disk that loses power: compute its possible content from the calls of a process.

It assumes no more than ext4, XFS and Btrfs keep:
- Bytes of a file are safe once fsync of the file has returned. Before that, each sector (512 bytes;
  at times each page of 4 KiB) holds the bytes of any write since, or those of before,
  independently of its neighbours. The length of the file may be any it had; lost bytes of a longer
  file read as zeros.
- A name (new, linked, renamed, removed) is safe once fsync of its directory has returned; for a
  renamed one, of the directory it moved to. Before that any of these changes may be missing, in any
  combination in which each makes sense. fsync of a file does not save its name.
- A rename is one step: never both names, never neither.
- What was safe stays so: no decayed bits (that is what digests are for), no disk that only says it
  has written.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.tracer import FileCall

SECTOR, PAGE = 512, 4096
# path -> bytes, None for a directory; a directory comes before what is in it
Tree = dict[str, bytes | None]


@dataclass(slots=True, eq=False)
class File:
    safe: bytes = b""
    now: bytearray = field(default_factory=bytearray)
    writes: list[tuple[int, bytes]] = field(default_factory=list)  # since the last fsync
    sizes: list[int] = field(default_factory=list)

    def write(self, offset: int, data: bytes) -> None:
        self.writes.append((offset, data))
        self.now.extend(bytes(max(0, offset + len(data) - len(self.now))))
        self.now[offset : offset + len(data)] = data
        self.sizes.append(len(self.now))

    def truncate(self, size: int) -> None:
        if size < len(self.now):  # should it grow again, it does with zeros
            self.writes.append((size, bytes(len(self.now) - size)))
        self.now = self.now[:size].ljust(size, b"\0")
        self.sizes.append(size)

    def sync(self) -> None:
        self.safe = bytes(self.now)
        self.writes.clear()
        self.sizes.clear()


@dataclass(slots=True, eq=False)
class Directory:
    safe: dict[str, Node] = field(default_factory=dict)
    now: dict[str, Node] = field(default_factory=dict)


Node = File | Directory
Names = dict[Directory, dict[str, Node]]


@dataclass(frozen=True, slots=True)
class Change:
    """A change of names: `gone` is removed, `new` appears for `node`."""

    gone: tuple[Directory, str] | None
    new: tuple[Directory, str] | None
    node: Node

    @property
    def saved_with(self) -> Directory:
        """Return the directory whose fsync makes the change safe."""
        place = self.new or self.gone
        assert place is not None
        return place[0]

    def apply(self, names: Names) -> None:
        """Unless another change is missing without which it could not have been made."""
        if self.gone is not None and names[self.gone[0]].get(self.gone[1]) is not self.node:
            return
        if self.gone is None and self.new is not None and self.new[1] in names[self.new[0]]:
            return
        if self.gone is not None:
            del names[self.gone[0]][self.gone[1]]
        if self.new is not None:
            names[self.new[0]][self.new[1]] = self.node


class Disk:
    """Begins with what is safe already; fed with the calls of a process, in order. Says what a
    crash might leave.
    """

    def __init__(self, root: Path, before: Mapping[str, bytes | None]) -> None:
        self._path = f"{root}"
        self._root = Directory()
        self._directories = [self._root]
        self._changes: list[Change] = []  # since the fsync of their directories
        for path, data in before.items():
            if path != self._path:
                self._new(
                    path, Directory() if data is None else File(safe=data, now=bytearray(data))
                )
        for change in self._changes:
            change.apply({directory: directory.safe for directory in self._directories})
        self._changes.clear()

    def apply(self, call: FileCall) -> None:
        """One more call has happened."""
        node = self._find(call.path)
        if call.name == "open" and node is None:
            self._new(call.path, File())
        elif call.name == "open" and call.offset & os.O_TRUNC:
            assert isinstance(node, File)
            node.truncate(0)
        elif call.name == "mkdir":
            self._new(call.path, Directory())
        elif node is None:
            return  # a descriptor of what was removed
        elif call.name == "link":
            self._new(call.target, node)
        elif call.name in ("rename", "unlink"):
            self._change(
                Change(
                    self._place(call.path), self._place(call.target) if call.target else None, node
                )
            )
        elif call.name == "fsync" and isinstance(node, Directory):
            self._sync_names(node)
        elif isinstance(node, File):
            _apply_to_content(node, call)

    def everything(self) -> Tree:
        """Return the files that SIGKILL leaves."""
        names = {directory: directory.now for directory in self._directories}
        return {
            path: bytes(node.now) if isinstance(node, File) else None
            for path, node in self._walk(names)
        }

    def after_power_loss(self, rng: random.Random) -> Tree:
        """One of the many states a power cut can leave."""
        kept = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        names = {directory: dict(directory.safe) for directory in self._directories}
        for change in self._changes:
            if rng.random() < kept:
                change.apply(names)
        return {
            path: _content(node, rng, kept=kept) if isinstance(node, File) else None
            for path, node in self._walk(names)
        }

    def _walk(self, names: Names) -> Iterator[tuple[str, Node]]:
        waiting: list[tuple[str, Node]] = [(self._path, self._root)]
        while waiting:
            path, node = waiting.pop()
            yield path, node
            if isinstance(node, Directory):
                waiting += [(f"{path}/{name}", child) for name, child in names[node].items()]

    def _find(self, path: str) -> Node | None:
        node: Node | None = self._root
        for name in path.removeprefix(self._path).split("/")[1:]:
            node = node.now.get(name) if isinstance(node, Directory) else None
        return node

    def _place(self, path: str) -> tuple[Directory, str]:
        directory = self._find(os.path.dirname(path))
        assert isinstance(directory, Directory), path
        return directory, os.path.basename(path)

    def _new(self, path: str, node: Node) -> None:
        self._change(Change(None, self._place(path), node))
        if isinstance(node, Directory):
            self._directories.append(node)

    def _change(self, change: Change) -> None:
        self._changes.append(change)
        change.apply({directory: directory.now for directory in self._directories})

    def _sync_names(self, directory: Directory) -> None:
        """Its changes are safe, and what they build upon: a rename does not outlive the name it
        moved.
        """
        wanted, moved = {directory}, set()
        safe, waiting = [], []
        for change in reversed(self._changes):
            if change.saved_with in wanted or (change.node in moved and change.new is not None):
                safe.append(change)
                moved |= {change.node} if change.gone is not None else set()
            else:
                waiting.append(change)
        names = {each: each.safe for each in self._directories}
        for change in reversed(safe):
            change.apply(names)
        self._changes = waiting[::-1]


def read_tree(root: Path) -> Tree:
    """Read the files that are there to begin with."""
    return {
        f"{path}": path.read_bytes() if path.is_file() else None
        for path in [root, *sorted(root.rglob("*"))]
    }


def lay_out(left: Tree, *, instead_of: Path, at: Path) -> None:
    """Make the files of `left`, which were beneath `instead_of`, beneath `at`."""
    for path, data in left.items():
        target = f"{at}{path.removeprefix(f'{instead_of}')}"
        if data is None:
            os.mkdir(target)
        else:
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT, 0o644)
            os.write(descriptor, data)
            os.close(descriptor)


def _apply_to_content(file: File, call: FileCall) -> None:
    if call.name == "fsync":
        file.sync()
    elif call.name == "write":
        file.write(call.offset, call.data)
    elif call.name == "truncate":
        file.truncate(call.offset)


def _content(file: File, rng: random.Random, *, kept: float) -> bytes:
    if not file.sizes:  # nothing since the last fsync
        return file.safe
    if rng.random() < kept * kept:
        return bytes(file.now)
    block = rng.choice((SECTOR, PAGE))
    size = file.sizes[-1] if rng.random() < kept else rng.choice((*file.sizes, len(file.safe)))
    content = bytearray(file.safe)
    content.extend(bytes(max(0, max(file.sizes) - len(content))))
    versions: dict[int, list[tuple[int, bytes]]] = {}
    for offset, data in file.writes:
        for start in _blocks(offset, len(data), block):
            begin, end = max(offset, start), min(offset + len(data), start + block)
            versions.setdefault(start, []).append((begin, data[begin - offset : end - offset]))
    for pieces in versions.values():
        n = len(pieces) if rng.random() < kept else rng.randrange(len(pieces) + 1)
        for begin, piece in pieces[:n]:
            content[begin : begin + len(piece)] = piece
    return bytes(content[:size])


def _blocks(offset: int, size: int, block: int) -> Sequence[int]:
    return range(offset - offset % block, offset + size, block)
