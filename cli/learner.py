"""python -m learner COMMAND ...: take out of a run what it learned, or train its steps again.

`export.py` and `replay.py` do it. Their arguments stand here, so that `--help` and mistakes need no
torch.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from printable import (
    ArgumentParser,
    UserError,
    fail,
    plain_console,
    printable,
    protect_terminal,
)
from store import StoreError

EXIT_DIFFERENT = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # as shells have it: 128 + SIGINT
TRUST = "follow the settings of a run that somebody else made; needed once"
EXPORT = """Writes weights, configuration and tokenizer as transformers and vLLM load them. Without an option those of the
newest published version. A checkpoint's float32 weights are rounded to model.dtype, as those of its version were; LoRA
adapters are merged into the base model. The digest printed is that of `cat DEST/*.safetensors | b3sum`.

With --adapter only the adapters, in float32, as peft and vLLM load them beside the base model."""
REPLAY = """Trains learner steps again from what the run stored, and compares: the digest of the weights with the published
one, and the recorded figures. Begins at the newest kept checkpoint before step K, else at the base model (keep more of them
with learner.keep_every), and compares the steps in between too. The run is only read.

--set gives what the run was continued with and run.json, written by its first start, does not have: learner.steps or
learner.learning_rate, for example. The exit status is 0 if all is identical, 1 if something differs, 2 if
steps cannot be replayed, because a stored file was changed, for example, which is then named."""


def main(arguments: list[str]) -> int:
    options = parsed(arguments)
    try:
        from store import RunLayout, trust

        # A path that is no run is refused before seconds of imports. Models and checkpoints are
        # read by libraries, which would follow a link out of a stranger's run.
        RunLayout.open(options.run_dir).check_no_links()
        if options.trust:
            trust(options.run_dir)
        return run(options)
    except (StoreError, OSError) as error:
        return failed(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(
        prog="python -m learner",
        description="Takes out of a run what it learned, or learns it again.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_export(commands)
    add_replay(commands)
    return parser.parse_args(arguments)


def add_export(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "export",
        help="write a version or a checkpoint as a Hugging Face directory, or its adapters as peft has them",
        description=EXPORT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN", help="a run directory, also of a run that is training"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--version", type=int, metavar="N", help="a published policy version (default: the newest)"
    )
    which.add_argument(
        "--checkpoint", type=int, metavar="STEP", help="the checkpoint after this learner step"
    )
    parser.add_argument("--trust", action="store_true", help=TRUST)
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="a checkpoint's LoRA adapters (default: the newest's)",
    )
    parser.add_argument(
        "dest", type=Path, metavar="DEST", help="a directory that does not exist yet"
    )


def add_replay(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "replay",
        help="train learner steps again from what is stored, and compare the weights",
        description=REPLAY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN", help="a run directory, also of a run that is training"
    )
    parser.add_argument(
        "--step", type=int, required=True, metavar="K", help="the learner step to replay"
    )
    parser.add_argument("--to", type=int, metavar="M", help="and all that follow, up to this one")
    parser.add_argument("--trust", action="store_true", help=TRUST)
    parser.add_argument(
        "--explain", action="store_true", help="show what each group brought into learner step K"
    )
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="key=value",
        help="settings that the run was continued with",
    )


def run(options: argparse.Namespace) -> int:
    """Run the command, and with it load torch. Raises StoreError, OSError."""
    try:
        return export_model(options) if options.command == "export" else replay(options)
    except (ValueError, UserError) as error:  # ValueError: of settings and models
        return failed(error)


def export_model(options: argparse.Namespace) -> int:
    import learner
    from store import RunLayout

    layout = RunLayout.open(options.run_dir)
    step: int | None = options.checkpoint
    if options.dest.exists():
        raise UserError(f"{options.dest} exists; choose another directory, or remove it")
    if options.adapter:
        if options.version is not None:
            raise UserError(
                f"--version {options.version} was published with its adapters merged; give "
                "--checkpoint STEP instead"
            )
        step = learner.newest_checkpoint(layout) if step is None else step
        digest = learner.export_adapter(layout, step, options.dest)
        exported = f"the adapters after learner step {step}"
    elif step is not None:
        digest = learner.export_checkpoint(layout, step, options.dest)
        exported = f"the checkpoint after learner step {step}"
    else:
        version = learner.find_version(layout, options.version)
        digest = learner.export_version(layout, version, options.dest)
        exported = f"version {version.version}, of learner step {version.learner_step}"
    print(printable(f"{options.dest}: {exported} of {layout.root}; digest {digest}"))
    return 0


def replay(options: argparse.Namespace) -> int:
    from learner import replay_steps

    is_same = replay_steps(
        options.run_dir,
        first=options.step,
        last=options.step if options.to is None else options.to,
        settings=options.set,
        explains=options.explain,
        console=plain_console(soft_wrap=False),
    )
    return 0 if is_same else EXIT_DIFFERENT


def failed(error: Exception) -> int:
    fail(error)
    return EXIT_ERROR


if __name__ == "__main__":
    protect_terminal()
    sys.exit(main(sys.argv[1:]))
