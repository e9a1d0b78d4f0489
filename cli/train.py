"""gigpo train: train an agent, go on with a run, or fork one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cli.arguments import ALL_NEEDS, Command, RunPath, all_option, settings_argument, trust_option

if TYPE_CHECKING:
    from configs import Config
    from driver import Screen

DOES_NOT_FIT = 1  # exit status
NEEDS = "give a config, e.g. configs/quickstart.yaml, or --resume RUN, or --fork RUN@STEP"
EPILOG = """\b
Examples:
  gigpo train configs/quickstart.yaml run_dir=runs/mine seed=1
  gigpo train configs/quickstart.yaml --dry-run
  gigpo train configs/alfworld_qwen2.5_1.5b.yaml --dry-run --plan
  gigpo train --resume runs/mine learner.steps=200
  gigpo train --resume s3://bucket/run
  gigpo train configs/quickstart.yaml --resume s3://bucket/run --trust
  gigpo train --fork runs/mine@20 run_dir=runs/gentler learner.learning_rate=1e-4
  gigpo train configs/quickstart.yaml run_dir=runs/offline source=runs/mine
\b
Exit status: 0 done, 1 --plan found something that does not fit its GPU, 2 an error, 130 stopped in
order. What --dry-run finds missing on this machine does not change it.
"""


@click.command(cls=Command, epilog=EPILOG)
@click.argument("config", required=False)
@settings_argument
@click.option(
    "--resume",
    type=RunPath(path_type=str),
    metavar="RUN",
    help="Go on with a run, with its own settings; of a URI, in run_dir=DIR or runs/NAME.",
)
@click.option(
    "--fork",
    type=RunPath(path_type=str, has_step=True),
    metavar="RUN@STEP",
    help="Make a new run from a checkpoint of another run.",
)
@click.option("--quiet", is_flag=True, help="Show errors, warnings and the report at the end only.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Write one line of JSON per learner step and per event, and nothing else, to stdout.",
)
@click.option("--dry-run", is_flag=True, help="Show what a start would do, and start nothing.")
@all_option
@click.option(
    "--plan",
    is_flag=True,
    help="With --dry-run: estimate memory of each GPU, tokens/s, and what will wait for what.",
)
@trust_option
def train(
    *,
    config: str | None,
    settings: tuple[str, ...],
    resume: str | None,
    fork: str | None,
    quiet: bool,
    as_json: bool,
    dry_run: bool,
    all_settings: bool,
    plan: bool,
    trust: bool,
) -> int:
    """Train an agent, or go on with a run.

    CONFIG is a YAML file, e.g. configs/quickstart.yaml; KEY=VALUE changes its settings. The same
    command goes on with a run that was stopped or killed. So does --resume RUN, which needs no
    config. CONFIG --resume URI begins a run in that storage, or goes on with the one that is there.
    """
    _check_flags(
        has_run=bool(config or resume or fork),
        all_settings=all_settings,
        plan=plan,
        resume=resume,
        fork=fork,
        quiet=quiet,
        as_json=as_json,
        dry_run=dry_run,
    )

    import driver

    driver.Interrupt().listen()
    screen = _screen(quiet=quiet, as_json=as_json)
    resolved = _resolved_settings(
        config, settings, resume=resume, fork=fork, dry_run=dry_run, trust=trust, screen=screen
    )
    if dry_run:
        fits = driver.dry_run(
            resolved, screen, all_settings=all_settings, estimates=plan, fork_of=fork or ""
        )
        return 0 if fits else DOES_NOT_FIT
    driver.train(resolved, screen, fork_of=fork or "")
    return 0


def _check_flags(
    *,
    has_run: bool,
    all_settings: bool,
    plan: bool,
    resume: str | None,
    fork: str | None,
    quiet: bool,
    as_json: bool,
    dry_run: bool,
) -> None:
    """Raise UsageError for flags that make no sense together."""
    if not has_run:
        raise click.UsageError(NEEDS)
    if all_settings and not dry_run:
        raise click.UsageError(ALL_NEEDS)
    if plan and not dry_run:
        raise click.UsageError("--plan starts nothing; give it with --dry-run")
    if resume and fork:
        raise click.UsageError("--resume and --fork exclude each other; give one of them")
    if quiet and as_json:
        raise click.UsageError("--quiet and --json exclude each other; give one of them")
    if dry_run and (quiet or as_json):
        raise click.UsageError("--dry-run only shows; leave --quiet and --json out")


def _screen(*, quiet: bool, as_json: bool) -> Screen:
    import driver

    if as_json:
        return driver.Screen.json()
    return driver.Screen.quiet() if quiet else driver.Screen.full()


def _resolved_settings(
    config: str | None,
    settings: tuple[str, ...],
    *,
    resume: str | None,
    fork: str | None,
    dry_run: bool,
    trust: bool,
    screen: Screen,
) -> Config:
    """Return the settings of the run, which is brought to this machine first if it is in a URI."""
    import driver
    from store import has_begun, is_uri

    # `CONFIG --resume URI`: the run begins there, unless it is there already.
    has_config_for_uri = bool(resume and is_uri(resume) and config and "=" not in config)
    if (resume or fork) and config and not has_config_for_uri:  # the first word is a setting too
        settings = (config, *settings)
    if resume and is_uri(resume):
        if dry_run:
            raise click.UsageError(
                "--dry-run brings no run here; leave out --resume URI to plan CONFIG, or give the "
                "directory of a run that is here"
            )
        if has_config_for_uri and not has_begun(resume):
            assert config is not None
            # If a volume is not mounted, nothing is there either.
            screen.console.print(f"no run is at {resume} yet; a new one begins there")
            return driver.settings_to_begin(config, resume, settings, trusts=trust)
        run, settings = driver.bring(resume, settings, trusts=trust, say=screen.console.print)
        return driver.settings_to_resume(run, settings, trusts=trust)
    if resume:
        return driver.settings_to_resume(Path(resume), settings, trusts=trust)
    if fork:
        return driver.settings_to_fork(fork, settings, trusts=trust)
    assert config is not None
    return driver.settings_to_train(config, settings, trusts=trust)
