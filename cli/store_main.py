"""python -m store COMMAND ...: the commands are the modules of store/cli."""

from __future__ import annotations

import errno
import importlib
import os
import sys

from cli.store_arguments import Parser
from printable import fail, protect_terminal
from store.errors import StoreError

ELSEWHERE = "What other settings (gamma, omega, anchor, signal) would have trained on: python cli/audit.py RUN name=value --against"
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # as shells have it: 128 + SIGINT


def main(arguments: list[str]) -> int:
    parser = Parser(
        prog="python -m store",
        description="Asks and tends a run, also while it is training.",
        epilog=ELSEWHERE,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    names = ["bias", "compact", "exchange", "fetch", "fsck", "rebuild", "sql"]
    wanted = arguments[0] if arguments and arguments[0] in names else None
    for name in names if wanted is None else [wanted]:
        importlib.import_module(f"cli.{name}").add(commands)
    try:
        options = parser.parse_args(arguments)
        status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head`: whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except StoreError as error:
        fail(error)
        return EXIT_ERROR
    # a process border: of a full disk, a limit, a permission
    except (OSError, MemoryError) as error:
        fail(_in_one_line(error))
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    else:
        return status
    return 0


def _in_one_line(error: OSError | MemoryError) -> str:
    """Return what the machine refused, and what to do."""
    if isinstance(error, MemoryError):
        return "there is not enough memory; ask for less, or free some"
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{where}too many open files; raise the limit, e.g. ulimit -n 4096, then retry"
    return f"{where}{error.strerror or error}; free space or fix the permissions, then retry"


if __name__ == "__main__":
    protect_terminal()
    sys.exit(main(sys.argv[1:]))
