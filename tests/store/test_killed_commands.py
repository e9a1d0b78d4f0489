"""SIGKILL while `fsck --repair`, `rebuild`, a fork, `import`, `export` or `fetch` works, then the
same command again.

Nothing is lost or doubled, what a command only reads is as it was, and what is half made is never
taken for a whole.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from store import FormatError, RunLayout
from store.exchange.fork import UNFINISHED
from store.run_names import FORK_MARKER
from tests.crash.commands import COMMANDS, kill_and_give_again, undisturbed
from tests.crash.lab import scratch, workers
from tests.store.test_crash import evenly

# How many system calls each command is killed at, spread over it. `make test-crash`: 9999, which is
# more than any command makes, so at all of them.
POINTS = int(os.environ.get("STORE_COMMAND_KILLS", "3"))


@pytest.mark.parametrize("name", COMMANDS)
def test_killed_anywhere_a_command_that_is_given_again_ends_as_if_it_had_not_been(
    name: str,
) -> None:
    pool = workers()
    with scratch() as directory:
        expected = pool.submit(undisturbed, name, directory).result()
        points = evenly(range(1, expected.n_calls + 1), POINTS)
        kills = [
            (point, pool.submit(kill_and_give_again, name, directory, point, expected))
            for point in points
        ]
        bad = [(point, broken) for point, kill in kills if (broken := kill.result())]
    print(f"{name}: {len(points)} of {expected.n_calls} calls, {len(bad)} bad")
    assert bad == []


def test_a_fork_that_was_cut_short_is_not_opened(tmp_path: Path) -> None:
    layout = RunLayout.create(tmp_path / f"made{UNFINISHED}", config_yaml="a: 1\n")
    (layout.root / FORK_MARKER).touch()
    with pytest.raises(
        FormatError, match="a fork that was cut short; remove it, and give the command again"
    ):
        RunLayout.open(layout.root)
