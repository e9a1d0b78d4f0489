"""Run ranks as processes that are forked from one, which imports torch and DeepSpeed for all.

    with forked_ranks("tests.support.rank_cases", 2, address, base, out) as ranks:
        assert ranks.wait(DEADLINE_S) == 0      # each has called the module's `main`

    python -m tests.support.forked_ranks MODULE RANKS ARGUMENTS...      # the same

`sys.argv[1:]` of a rank is its number and the arguments.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@contextmanager
def forked_ranks(module: str, n_ranks: int, *arguments: object) -> Iterator[subprocess.Popen]:
    """Start the ranks, and kill at the end what still runs. The process that forks them ends with
    0 if all of them do.
    """
    command = [sys.executable, "-m", "tests.support.forked_ranks", module, str(n_ranks)]
    process = subprocess.Popen([*command, *map(str, arguments)], cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def run_rank(module: str, rank: int, arguments: list[str]) -> None:
    """Call `main` in a forked process, and end it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    status = 1
    try:
        sys.argv = [module, str(rank), *arguments]
        importlib.import_module(module).main()
        status = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    module, n_ranks, *arguments = sys.argv[1:]
    gc.disable()
    importlib.import_module(module)
    gc.freeze()  # DeepSpeed collects garbage at every start of an engine
    gc.enable()
    ranks = []
    for rank in range(int(n_ranks)):
        ranks.append(os.fork())
        if not ranks[-1]:
            run_rank(module, rank, arguments)
    statuses = [os.waitpid(rank, 0)[1] for rank in ranks]
    raise SystemExit(0 if not any(statuses) else f"statuses of the ranks: {statuses}")


if __name__ == "__main__":
    main()
