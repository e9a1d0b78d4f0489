"""Keep the answers of a deterministic environment in files, beyond the process that got them.

    keeper = AnswerKeeper("textworld", options, pending=pending, log=log)
    file = await keeper.open(task)            # None if the environment keeps none
    file.states                               # what is known: a record for each state
    keeper.save(file, {state: record})

A task has one file, in a folder that its environment names (`kept_answers`). The file's name is a
digest of all that decides an answer, the code of the environment among it: what has changed never
meets old answers. A record is JSON, read when an episode comes to its state. Nothing in a file is
executed, and a record is checked like an answer of the environment itself.

A file is replaced as a whole, by a rename, so a kill leaves the old one or the new one. Two writers
at once may lose answers of one of them, which are asked for again. A file that is damaged, or was
made by something else, is ignored, with one line in the log.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import sys
import tempfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from bounded_json import read_value
from envs.base import KeptAnswers, Observation, Task, Transition
from envs.error_texts import describe_error
from envs.errors import EnvironmentDied
from envs.hosting.answers import Understood
from envs.hosting.pending import PendingOperations, run_in_thread
from envs.logs import write_log
from envs.options import Options
from envs.registry import environment_class
from envs.validation import checked_answer

# Raise it when equal answers would be written in another way, or read as others.
FORMAT = b"async-gigpo answers 1\n"
DIGEST_BYTES = 16
SUFFIX = ".answers"
MAX_FILE_BYTES = 2**22
MAX_TEXT_BYTES = 2**25  # of a file, once it is decompressed
MAX_FOLDER_BYTES = 2**29  # above it, the files written longest ago are removed
MAX_VALUES = 2**20  # in the record of one state
TIMEOUT_S = 20.0  # for reading one file; a storage that hangs is not asked again
SAVE_TIMEOUT_S = 60.0  # for all that is left when a worker ends

Result = Observation | Transition
Records = dict[bytes, bytes]  # state -> JSON of a `StateRecord`


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptAnswer:
    """The answer to one action, None for `reset`, and the state after it."""

    action: str | None
    result: Result
    state: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRecord:
    """All that is known of one state."""

    understood: Understood | None
    answers: tuple[KeptAnswer, ...]

    def encode(self) -> bytes:
        """Return one line of JSON. Raises ValueError for texts that are none."""
        understood = None
        if self.understood is not None:
            actions = _texts(self.understood.actions)
            understood = [actions, _transition_row(self.understood.otherwise)]
        answers = [[each.action, each.state.hex(), _row(each.result)] for each in self.answers]
        return json.dumps([understood, answers], separators=(",", ":")).encode()

    @classmethod
    def decode(cls, record: bytes) -> StateRecord:
        """Raises ValueError, TypeError and others if the record is not one that `encode` made."""
        row, answers = read_value(record, max_values=MAX_VALUES)
        understood = None
        if row is not None:
            actions, otherwise = row
            understood = Understood(
                actions=_texts(actions), otherwise=cast(Transition, _result(otherwise, "step"))
            )
        return cls(
            understood=understood,
            answers=tuple(
                KeptAnswer(
                    action=None if action is None else _texts([action])[0],
                    result=_result(result, "reset" if action is None else "step"),
                    state=bytes.fromhex(state),
                )
                for action, state, result in answers
            ),
        )


# What `decode` may raise for JSON of another form.
UNREADABLE = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError)


@dataclass(kw_only=True, slots=True)
class AnswerFile:
    """The file of one task, and the records that it had when it was opened."""

    path: Path
    identity: bytes  # digest of all that decides the task's answers
    states: Records

    def add(self, new: Mapping[bytes, bytes]) -> None:
        """Add records to the file. Answers that it has already, of any writer, stay in it."""
        try:
            merged = read_records(self.path, self.identity)
        except ValueError:  # it was ignored when it was opened, too
            merged = {}
        for state, record in new.items():
            merged[state] = _merged(record, merged[state]) if state in merged else record
        write_records(self.path, self.identity, merged)


class AnswerKeeper:
    """Open and save the answer files of a pool. Notes at most one fault of each kind in the log."""

    def __init__(
        self,
        env_name: str,
        options: Mapping[str, object],
        *,
        pending: PendingOperations,
        log: Path | None,
    ) -> None:
        self._env_name, self._options, self._pending, self._log = env_name, options, pending, log
        self._make = environment_class(env_name)
        self._keeps = getattr(self._make, "kept_answers", None) is not None
        self._folders: set[Path] = set()  # whose size was bounded
        self._noted: set[str] = set()

    async def open(self, task: Task) -> AnswerFile | None:
        """Return the task's file; None if there is none to be. Waits for the storage."""
        if not self._keeps:
            return None
        with self._pending.on(f"the storage, to read the kept answers of task {task.id!r}"):
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    return await asyncio.to_thread(self._open, task)
            except TimeoutError:
                self._give_up(f"reading one took longer than {TIMEOUT_S:g} s")
            except Exception as error:  # noqa: BLE001 - the border to a user's `kept_answers`
                self._give_up(f"reading one failed: {describe_error(error, called=None)}")
        return None

    def save(self, files: Iterable[tuple[AnswerFile, Mapping[bytes, bytes]]]) -> None:
        """Begin to add records to files, in a thread. The process does not end before."""
        if self._keeps:
            _ = asyncio.get_running_loop().run_in_executor(None, self._save, list(files))

    def save_now(self, files: Iterable[tuple[AnswerFile, Mapping[bytes, bytes]]]) -> None:
        """Add records to files. Waits for the storage."""
        if self._keeps:
            work = partial(self._save, list(files))
            try:
                run_in_thread(work, name="kept answers", timeout_s=SAVE_TIMEOUT_S)
            except TimeoutError:
                self._give_up(f"writing them took longer than {SAVE_TIMEOUT_S:g} s")

    def distrust(self, file: AnswerFile) -> None:
        """Remove a file whose answers the environment did not repeat."""
        with suppress(OSError):
            file.path.unlink()

    def note(self, fault: str) -> None:
        """Write one line to the log, unless it is there already."""
        if fault not in self._noted:
            self._noted.add(fault)
            write_log(self._log, f"kept answers of {self._env_name!r} {fault}\n")

    def _save(self, files: Sequence[tuple[AnswerFile, Mapping[bytes, bytes]]]) -> None:
        try:
            for file, new in files:
                file.add(new)
        except (OSError, ValueError) as error:
            self._give_up(f"writing one failed: {describe_error(error, called=None)}")

    def _give_up(self, fault: str) -> None:
        self._keeps = False
        self.note(f"are not used: {fault}")

    def _described(self, task: Task) -> KeptAnswers | None:
        """Return what the class says of its answers. Raises EnvironmentDied if it raises."""
        try:
            kept: KeptAnswers | None = self._make.kept_answers(  # type: ignore[attr-defined]
                Options(self._options), task
            )
        except BaseException as error:  # noqa: BLE001 - the border to a user's own code
            # SystemExit would end the event loop that waits for this thread.
            raise EnvironmentDied(describe_error(error, called=None), at_fault=True) from None
        return kept

    def _open(self, task: Task) -> AnswerFile | None:
        kept = self._described(task)
        if kept is None:
            return None
        identity = _digest((self._env_name, _code(self._make), task.id, *kept.decided_by))
        if kept.folder not in self._folders:
            self._folders.add(kept.folder)
            kept.folder.mkdir(parents=True, exist_ok=True)
            bound_folder(kept.folder)
        path = kept.folder / f"{identity.hex()}{SUFFIX}"
        try:
            states = read_records(path, identity)
        except ValueError as error:
            self.note(f"in {path} are ignored: {error}")
            states = {}
        return AnswerFile(path=path, identity=identity, states=states)


def read_records(path: Path, identity: bytes) -> Records:
    """Return the records of a file; none if it is not there.

    Raises ValueError if it is damaged or something else.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return {}
    with open(descriptor, "rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    head = FORMAT + identity
    begin = len(head) + DIGEST_BYTES
    if len(data) > MAX_FILE_BYTES or data[: len(head)] != head:
        raise ValueError("it is no file of such answers; remove it")
    if _digest((data[begin:],)) != data[len(head) : begin]:
        raise ValueError("its checksum is wrong, as after a power cut; it is written anew")
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(data[begin:], MAX_TEXT_BYTES)
        if not stream.eof:
            raise ValueError(f"it has more than {MAX_TEXT_BYTES} bytes of text; remove it")
        rows = (line.partition(b" ") for line in text.splitlines())
        return {bytes.fromhex(state.decode("ascii")): record for state, _, record in rows}
    except zlib.error as error:
        raise ValueError(f"it cannot be decompressed: {error}; remove it") from None


def write_records(path: Path, identity: bytes, records: Records) -> None:
    """Replace a file. Records that are too many are not written, and the old file stays."""
    text = b"".join(b"%s %s\n" % (state.hex().encode(), row) for state, row in records.items())
    payload = zlib.compress(text, level=1)
    data = FORMAT + identity + _digest((payload,)) + payload
    if len(text) > MAX_TEXT_BYTES or len(data) > MAX_FILE_BYTES:
        return
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=SUFFIX, delete=False) as scratch:
        try:
            scratch.write(data)
            scratch.flush()
            os.replace(scratch.name, path)
        except BaseException:
            os.unlink(scratch.name)
            raise


def bound_folder(folder: Path) -> None:
    """Remove the answer files written longest ago, if all together are too large.

    A killed writer leaves one under another name, which no task has: it gets old, too.
    """
    found = []
    for entry in os.scandir(folder):
        if entry.name.endswith(SUFFIX) and entry.is_file(follow_symlinks=False):
            with suppress(FileNotFoundError):  # another writer has renamed it
                status = entry.stat(follow_symlinks=False)
                found.append((status.st_mtime_ns, status.st_size, entry.path))
    n_bytes = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if n_bytes <= MAX_FOLDER_BYTES:
            return
        Path(path).unlink(missing_ok=True)
        n_bytes -= size


@cache
def _code(make: type) -> bytes:
    """Return a digest of the modules of a class and its bases, and of others in their packages.

    Code that they call elsewhere is for `kept_answers` to name.
    """
    parts: list[str | bytes] = [make.__qualname__]
    for each in make.__mro__:
        module = sys.modules[each.__module__]
        source = getattr(module, "__file__", None)
        if source is None and each is make:
            raise ValueError(f"{make.__name__} has no source file; do not keep its answers")
        if source is not None:
            file = Path(source)
            files = sorted(file.parent.glob("*.py")) if module.__package__ else [file]
            parts += [part for found in files for part in (found.name, found.read_bytes())]
    return _digest(parts)


def _digest(parts: Iterable[str | bytes]) -> bytes:
    """Return a digest of the parts and of where one ends and the next begins."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def _merged(record: bytes, older: bytes) -> bytes:
    """Return a record with the answers of an older one to other actions."""
    try:
        new, old = StateRecord.decode(record), StateRecord.decode(older)
    except UNREADABLE:
        return record
    known = {answer.action for answer in new.answers}
    others = tuple(answer for answer in old.answers if answer.action not in known)
    understood = new.understood or old.understood
    return StateRecord(understood=understood, answers=new.answers + others).encode()


def _texts(texts: Iterable[object]) -> tuple[str, ...]:
    taken = tuple(texts)
    if not all(isinstance(text, str) for text in taken):
        raise ValueError(f"a list of texts has something else in it: {taken!r:.80}")
    return cast(tuple[str, ...], taken)


def _row(result: Result) -> list[object]:
    return _transition_row(result) if isinstance(result, Transition) else _observation_row(result)


def _transition_row(transition: Transition) -> list[object]:
    return [
        _observation_row(transition.observation),
        transition.reward,
        transition.terminated,
        transition.truncated,
        transition.won,
        transition.valid,
        transition.task_score,
    ]


def _observation_row(seen: Observation) -> list[object]:
    images = [
        [*image.shape[:2], base64.b64encode(image.tobytes()).decode()] for image in seen.images
    ]
    return [seen.text, seen.objective, seen.anchor, seen.actions, seen.demonstrated, images]


def _result(row: Any, method: str) -> Result:
    """Return the answer of a row, checked like one of the environment."""
    if method == "reset":
        return checked_answer(method, _observation(row))
    seen, reward, terminated, truncated, won, valid, task_score = row
    transition = Transition(
        observation=_observation(seen),
        reward=reward,
        terminated=terminated,
        truncated=truncated,
        won=won,
        valid=valid,
        task_score=task_score,
    )
    return checked_answer(method, transition)


def _observation(row: Any) -> Observation:
    text, objective, anchor, actions, demonstrated, images = row
    return Observation(
        text=text,
        objective=objective,
        anchor=anchor,
        actions=None if actions is None else tuple(actions),
        demonstrated=demonstrated,
        images=tuple(
            np.frombuffer(bytearray(base64.b64decode(pixels)), np.uint8).reshape(height, width, 3)
            for height, width, pixels in images
        ),
    )
