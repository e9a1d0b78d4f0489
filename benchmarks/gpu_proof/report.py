"""Record the checks, figures and errors of one section in a JSON file, as they come.

    report = Report(path)
    with report.case("window 256"):                   # an error is recorded and the next case runs
        report.at_most("window 256: output", 0.003, 0.01)
    report.figure("tokens_per_s", 15000)
    report.needs_cuda("CUDA graph")

The file is rewritten after every entry, so a section that is killed keeps what it had found.
"""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SIGNIFICANT_DIGITS = 5


@dataclass(kw_only=True, slots=True)
class Report:
    """The checks and figures of one section. Each change is written to the file `path`."""

    path: Path
    checks: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    errors: list[dict[str, str]] = field(default_factory=list)

    def at_most(self, name: str, value: float, limit: float) -> None:
        """Check that a number is finite and not above its limit."""
        passed = math.isfinite(value) and value <= limit
        self.checks.append({"name": name, "passed": passed, "value": value, "limit": limit})
        self._write()

    def is_true(self, name: str, passed: bool) -> None:
        """Check a statement."""
        self.checks.append({"name": name, "passed": bool(passed)})
        self._write()

    def figure(self, name: str, value: object) -> None:
        """Record a measurement, which no limit judges."""
        self.figures[name] = value
        self._write()

    def needs_cuda(self, name: str) -> None:
        """Record that this part was not run, because it needs a CUDA device."""
        self.skipped.append(f"{name}: needs CUDA")
        self._write()

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Run one case. Record its error with the traceback, and let the next case run."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # recorded; the section fails by it
            self.errors.append(
                {"case": name, "error": one_line(error), "traceback": traceback.format_exc()}
            )
            self._write()

    def _write(self) -> None:
        record = {
            "checks": self.checks,
            "figures": self.figures,
            "skipped": self.skipped,
            "errors": self.errors,
        }
        write_json(self.path, record)


def one_line(error: BaseException) -> str:
    """Return the error's type and the first line of its message."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Replace the file at once, so that a reader never sees half of it."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps(plain(record), indent=1) + "\n")
    unfinished.replace(path)


def plain(value: Any) -> Any:
    """Round floats to five digits and name those that JSON cannot hold: nan becomes "nan"."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if math.isfinite(value) else str(value)
    return value
