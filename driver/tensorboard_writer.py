"""Write TensorBoard files of a run: each row of the metrics table once, at its learner step.

The files are a copy of the table. A start writes them anew, and so does a roll-back: they equal the
table again, whatever was killed when. Files that cannot be written never end a run. Only the
`tensorboard` package is imported, and not before the first row.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import BinaryIO

from store import Metric, RunLayout

DIRECTORY = "tensorboard"
EVENT_FILES = "events.out.tfevents.*"  # the names that TensorBoard reads
UNFINISHED = "unfinished"  # being written, not read by TensorBoard: a killed start leaves it

_number = itertools.count()


class TensorBoardFiles:
    """The TensorBoard files of one run, written by the one process that drives it."""

    def __init__(self, layout: RunLayout, say: Callable[[str], None]) -> None:
        self.directory = layout.root / DIRECTORY
        self._say = say
        self._file: BinaryIO | None = None
        self._failed = False  # the files could not be written: this start writes no more of them

    def wants(self) -> bool:
        return not self._failed

    def take(self, rows: Sequence[Metric], *, has_all_rows: bool) -> None:
        """Write the rows. If they cannot be written, say so once and write no more."""
        try:
            if self._file is not None and not has_all_rows:
                _write_metrics(self._file, rows)
            elif rows or any(self.directory.glob(EVENT_FILES)):
                self._begin_anew(rows)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the file. Idempotent. If its last bytes cannot be written, say so once."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            file.close()  # closes it also where it raises
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Say once that the files cannot be written, and write no more of them."""
        if self._failed:
            return
        self._failed = True
        self._say(
            f"{self.directory} cannot be written: {error.strerror or error}; no more curves are "
            "written in this start. The store has all metrics, and the next start writes the files "
            "anew"
        )
        self.close()

    def _begin_anew(self, rows: Sequence[Metric]) -> None:
        """Replace all files by one with these rows. A kill leaves the old ones or the new one."""
        self.close()
        self.directory.mkdir(exist_ok=True)
        old = list(self.directory.glob(EVENT_FILES))
        unfinished = self.directory / UNFINISHED
        self._file = unfinished.open("wb")
        _write_head(self._file)
        _write_metrics(self._file, rows)
        now_s = int(time.time())
        host = socket.gethostname()
        number = next(_number)
        name = EVENT_FILES.replace("*", f"{now_s:010d}.{host}.{os.getpid()}.{number:06d}")
        unfinished.rename(self.directory / name)
        for path in old:
            # Emptied now and removed at the next replacement: an open TensorBoard never reads past
            # a missing file.
            if path.stat().st_size:
                os.truncate(path, 0)
            else:
                path.unlink()


def _write_head(file: BinaryIO) -> None:
    """Write the version record, and a session start that voids the values shown before."""
    # here: it takes 0.2 s, and a run that fails early has no use for it
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    now_s = time.time()
    _write(file, Event(wall_time=now_s, file_version="brain.Event:2").SerializeToString())
    # At a START event with step 0, an open TensorBoard drops all values of the replaced files.
    start = SessionLog(status=SessionLog.START)
    _write(file, Event(wall_time=now_s, step=0, session_log=start).SerializeToString())
    file.flush()


def _write_metrics(file: BinaryIO, rows: Sequence[Metric]) -> None:
    """Write one event per learner step. `rows` are ordered by learner step."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    for learner_step, some in itertools.groupby(rows, key=lambda row: row.learner_step):
        of_step = list(some)
        summary = Summary(
            value=[Summary.Value(tag=row.name, simple_value=row.value) for row in of_step]
        )
        event = Event(wall_time=of_step[0].at_us / 1e6, step=learner_step, summary=summary)
        _write(file, event.SerializeToString())
    file.flush()


def _write(file: BinaryIO, record: bytes) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    RecordWriter(file).write(record)
