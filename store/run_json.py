"""Read run.json, which is written once, and check the format of a run's files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from store.errors import FormatError, OtherFormatError
from store.untrusted import json_values

# Format of a run and of every file in it. A change that this version would misread needs another
# name.
FORMAT = "async-gigpo/3"
ANY_FORMAT = re.compile(r"(async-gigpo/)?[0-9]{1,9}")  # of this, an earlier or a later version
RUN_ID = re.compile(r"[0-9a-f]{32}")


def check_format(content: Mapping[str, object], *, name: str) -> None:
    """Check the field `format` of a file.

    Raises OtherFormatError for another format than FORMAT, ValueError if it is no format's name.
    """
    found = content.get("format", content.get("format_version"))  # the field of earlier versions
    if not isinstance(found, str | int) or not ANY_FORMAT.fullmatch(str(found)):
        raise ValueError(f"format is {found!r:.80}, and no version has such a one")
    if found != FORMAT:
        raise other_format(name, repr(found)[:40])


def other_format(name: str, found: str) -> OtherFormatError:
    """Return the error for a file of another format."""
    return OtherFormatError(
        f"{name} has format {found}, and this version reads {FORMAT!r} only; "
        "use the version that wrote it, or start a new run"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """The content of run.json."""

    run_id: str  # 32 hex digits, part of every group and trajectory uid
    format: str
    canonicaliser_version: int
    config_yaml: str  # the resolved configuration, as text
    created_us: int
    # where segments, exports, weights and checkpoints are, None: in the run directory; storage.py
    storage_uri: str | None = None
    forked_from: str | None = None  # run id and learner step, as RUN@STEP
    # run ids of the runs that it was forked from, oldest first: it has files of theirs
    ancestors: tuple[str, ...] = ()

    def wrote(self, run_id: str) -> bool:
        """Return whether this run may have files that the run `run_id` wrote."""
        return run_id in (self.run_id, *self.ancestors)


def parse_run_json(data: bytes, *, name: str) -> RunInfo:
    """Return the content of a run.json. Raises FormatError naming the file."""
    try:
        content = json_values.parse_object(data)
        check_format(content, name=name)
        info = RunInfo(
            run_id=json_values.text(content, "run_id"),
            format=FORMAT,
            canonicaliser_version=json_values.integer(content, "canonicaliser_version"),
            config_yaml=json_values.text(content, "config_yaml"),
            created_us=json_values.integer(content, "created_us"),
            storage_uri=json_values.optional_text(content, "storage_uri"),
            forked_from=json_values.optional_text(content, "forked_from"),
            ancestors=json_values.texts(content, "ancestors"),
        )
        for run_id in (info.run_id, *info.ancestors):
            checked_run_id(run_id)
    except ValueError as error:
        is_here = "://" not in name  # only a directory can be rebuilt
        rebuild = f", or: gigpo rebuild {Path(name).parent}" if is_here else ""
        raise FormatError(
            f"{name} is damaged ({error}); restore it from a backup{rebuild}"
        ) from error
    return info


def checked_run_id(text: str) -> str:
    """Return the text. Raises ValueError unless it has the form of a run id."""
    if not RUN_ID.fullmatch(text):
        raise ValueError(f"{text[:80]!r:.80} is not a run id of 32 hex digits")
    return text
