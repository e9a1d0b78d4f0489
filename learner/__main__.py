"""python -m learner COMMAND ...: what can be done with what a run learned."""

from __future__ import annotations

import argparse
import sys

from configs import ConfigError
from learner import export
from learner.checkpoint import CheckpointError
from store import StoreError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # as shells have it: 128 + SIGINT


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m learner", description="Takes out of a run what it learned.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    export.add(commands)
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
    except (export.ExportError, CheckpointError, StoreError, ConfigError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
