"""python -m learner COMMAND ...: what can be done with what a run learned, and how it did."""

from __future__ import annotations

import argparse
import sys

from configs import ConfigError
from learner import export, replay
from learner.checkpoint import CheckpointError
from learner.engine import WreckedPolicyError
from learner.process import RankError
from store import StoreError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # as shells have it: 128 + SIGINT

ERRORS = (
    export.ExportError,
    replay.ReplayError,
    CheckpointError,
    RankError,
    WreckedPolicyError,
    StoreError,
    ConfigError,
    OSError,
)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m learner", description="Takes out of a run what it learned, or learns it again."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    export.add(commands)
    replay.add(commands)
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
    except ERRORS as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
