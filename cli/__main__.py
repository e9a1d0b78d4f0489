"""Run the `gigpo` program: `gigpo COMMAND ...`, or `python -m cli COMMAND ...` in a checkout.

Exit status: 0 done, 1 a check found something, 2 an error, 3 an answer with files left out, 130
interrupted. Every error that a user can mend is shown in one line.
"""

from __future__ import annotations

import errno
import gc
import os
import re
import shlex
import sys
from collections.abc import Sequence

import click
from click.shell_completion import shell_complete

from cli.arguments import Settings
from cli.audit import audit
from cli.bias import bias
from cli.evaluate import evaluate
from cli.models import export_model, replay
from cli.report import report
from cli.run_control import status, stop, workers
from cli.sql import sql
from cli.store import compact, export, fetch, fsck, import_, rebuild
from cli.study import study
from cli.train import train
from cli.view import view
from printable import UserError, fail, open_missing_streams, printable, protect_terminal
from usage_statistics import usage_statistics_off

EXIT_ERROR = 2  # as click's own for wrong usage
EXIT_INTERRUPTED = 130  # the shells' convention: 128 + SIGINT
# New objects until garbage is collected. Python's 700 cost a fifth of the time of importing torch,
# whose objects all stay.
COLLECTED_AT = 100_000
# To add a command: write it in a module of this package, with an example in its help, and list it
# here. Run `python docs/make_reference.py`. If a page explains it, add a row to docs/README.md.
SECTIONS = {
    "Train": (train, evaluate, status, stop, workers),
    "Look": (view, report, sql, audit, bias, study),
    "Store": (fsck, rebuild, compact, export, import_, fetch),
    "Models": (export_model, replay),
}
COMPLETION = "_GIGPO_COMPLETE"  # an environment variable, set by the shell for a completion
EPILOG = f"""\b
Completion of commands and options, in bash (or zsh, fish):
  eval "$({COMPLETION}=bash_source gigpo)\""""
OPTION = re.compile(r"--([A-Za-z_][\w-]*(?:\.[\w-]+)*)")


class Program(click.Group):
    """A group whose help lists the commands in sections."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(str(command.name), command.get_short_help_str(80)) for command in commands]
                )


@click.version_option(package_name="async-gigpo", message="gigpo %(version)s")
@click.group(cls=Program, epilog=EPILOG, context_settings={"max_content_width": 100})
def program() -> None:
    """Train LLM agents with GiGPO, and look at what they did.

    Every command works on a run: the directory that a training makes. `gigpo COMMAND --help`
    explains one command.
    """


for section in SECTIONS.values():
    for command in section:
        program.add_command(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    if arguments is None:
        arguments = sys.argv[1:]
        open_missing_streams()
        protect_terminal()
        gc.set_threshold(COLLECTED_AT)
    os.environ.update(usage_statistics_off(os.environ))  # commands import the libraries later
    if instruction := os.environ.get(COMPLETION):
        return shell_complete(program, {}, "gigpo", COMPLETION, instruction)
    try:
        with program.make_context("gigpo", list(arguments) or ["--help"]) as context:
            exit_status: int | None = program.invoke(context)
        sys.stdout.flush()
        return exit_status or 0
    except click.exceptions.Exit as done:  # after --help
        return done.exit_code
    except click.UsageError as error:
        fail(f"{_describe_mistake(error, arguments)}; see {_command_of(error)} --help")
    except BrokenPipeError:  # the reader, `| head` for example, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except UserError as error:
        fail(error)
    except MemoryError:
        fail("there is not enough memory; ask for less, or free some")
    except OSError as error:
        fail(_describe_os_error(error))
    except KeyboardInterrupt as error:
        _show_interruption(error, arguments)
        return EXIT_INTERRUPTED
    return EXIT_ERROR


def _command_of(error: click.UsageError) -> str:
    return error.ctx.command_path if error.ctx else "gigpo"


def _describe_mistake(error: click.UsageError, arguments: Sequence[str]) -> str:
    """Return what is wrong with the arguments.

    A setting that is written like an option, --learner.steps=5, is named as it should be written.
    """
    if isinstance(error, click.NoSuchOption) and error.ctx:
        parameters = error.ctx.command.params
        options = [option for parameter in parameters for option in parameter.opts]
        takes_settings = any(isinstance(parameter, Settings) for parameter in parameters)
        if takes_settings and not any(each.startswith(error.option_name) for each in options):
            return _setting_hint(error.option_name, arguments) or _message_of(error)
    return _message_of(error)


def _message_of(error: click.UsageError) -> str:
    return error.format_message().rstrip(".?")


def _setting_hint(option: str, arguments: Sequence[str]) -> str | None:
    """Return how a setting is written, if an unknown option looks like one.

    Example: `--learner.steps 5` is written as learner.steps=5.
    """
    position = next(at for at, word in enumerate(arguments) if word.partition("=")[0] == option)
    _, equals, value = arguments[position].partition("=")
    found = OPTION.fullmatch(option)
    if not found or not (equals or "." in option):
        return None
    if not equals:
        following = arguments[position + 1] if position + 1 < len(arguments) else ""
        value = following if re.fullmatch(r"[^-=][^=]*", following) else "VALUE"
    setting = f"{found[1].replace('-', '_')}={value}"
    return f"{arguments[position]}: settings are given without dashes, as {setting}"


def _describe_os_error(error: OSError) -> str:
    """Return in one line what the machine refused, and what to do."""
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{where}too many open files; raise the limit, e.g. ulimit -n 4096, then retry"
    return f"{where}{error.strerror or error}; free space or fix the permissions, then retry"


def _show_interruption(error: KeyboardInterrupt, arguments: Sequence[str]) -> None:
    """Show how a run ended after Ctrl-C or SIGTERM, and the command that goes on with it."""
    if arguments[0] not in (train.name, evaluate.name):
        print("\ninterrupted", file=sys.stderr)
        return
    ended = str(error) or "stopped; no process of the run was up"
    again = shlex.join(["gigpo", *(word for word in arguments if word != "--trust")])
    # Standard output has lines of JSON only, if they were asked for.
    file = sys.stderr if "--json" in arguments else sys.stdout
    print(printable(f"\n{ended}. Go on with:  {again}", lines=True), file=file)


if __name__ == "__main__":
    sys.exit(main())
