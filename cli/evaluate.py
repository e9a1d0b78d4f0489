"""gigpo evaluate: play the held-out tasks, or compare two evaluations."""

from __future__ import annotations

from pathlib import Path

import click

from cli.arguments import ALL_NEEDS, Command, RunPath, all_option, settings_argument, trust_option
from printable import plain_console

NEEDS = "give a run, e.g. runs/quickstart, a config, or --compare RUN OTHER"
EPILOG = """\b
Examples:
  gigpo evaluate runs/mine                             the newest weights, into the run's own store
  gigpo evaluate runs/mine@40 run_dir=runs/mine_40     a checkpoint, into a new run
  gigpo evaluate runs/mine run_dir=runs/unseen env.options.heldout=valid_unseen
  gigpo evaluate configs/smollm_cpu.yaml model.path=MODEL run_dir=runs/base
  gigpo evaluate CONFIG endpoint.url=http://HOST:PORT/v1 endpoint.model=NAME run_dir=runs/big
  gigpo evaluate --compare runs/mine_40 runs/big
\b
Settings:
  evaluation.final_episodes_per_task   episodes of each task, each with its own sampling seed
  evaluation.temperature=0             greedy decoding
  env.options                          the tasks
"""


@click.command(cls=Command, epilog=EPILOG)
@click.argument(
    "weights",
    required=False,
    type=RunPath(path_type=str, has_step=True, may_be_config=True),
    metavar="RUN[@STEP]|CONFIG",
)
@settings_argument
@click.option(
    "--compare",
    nargs=2,
    type=RunPath(path_type=Path),
    metavar="RUN OTHER",
    help="Compare two evaluated runs task by task.",
)
@click.option(
    "--dry-run", is_flag=True, help="Show the settings and what is missing; play nothing."
)
@all_option
@trust_option
def evaluate(
    *,
    weights: str | None,
    settings: tuple[str, ...],
    compare: tuple[Path, Path] | None,
    dry_run: bool,
    all_settings: bool,
    trust: bool,
) -> None:
    """Play every held-out task and show the success by task type.

    The weights are those of a run, of one of its checkpoints, of a Hugging Face model, or of a
    model behind an OpenAI-compatible server. With KEY=VALUE settings the evaluation is a run of its
    own, and needs run_dir=NEW. The same command goes on where it was stopped: stored episodes are
    not played again.
    """
    if not weights and not compare:
        raise click.UsageError(NEEDS)
    if all_settings and not dry_run:
        raise click.UsageError(ALL_NEEDS)
    if weights and compare:
        raise click.UsageError(f"--compare takes two runs and nothing else; leave {weights} out")
    console = plain_console(soft_wrap=True)
    if compare:
        from analysis import show_evaluation_comparison

        show_evaluation_comparison(*compare, console=console)
        return

    import driver

    assert weights is not None
    driver.Interrupt().listen()
    driver.evaluate(
        weights,
        settings,
        console=console,
        trusts=trust,
        dry_run=dry_run,
        all_settings=all_settings,
    )
