"""gigpo export-model and replay: take a policy out of a run, and train its steps again."""

from __future__ import annotations

from pathlib import Path

import click

from cli.arguments import (
    AT_LEAST_0,
    AT_LEAST_1,
    Command,
    RunPath,
    run_argument,
    settings_argument,
    trust_option,
)
from printable import UserError, plain_console, say

DIFFERENT = 1  # exit status
EXPORT_EPILOG = """\b
Examples:
  gigpo export-model runs/a model                  the newest version
  gigpo export-model runs/a model --version 40     a published version
  gigpo export-model runs/a@80 model               a checkpoint
  gigpo export-model runs/a adapter --adapter      the newest checkpoint's LoRA adapters
  gigpo export-model runs/a adapter --adapter --version 40
"""
REPLAY_EPILOG = """\b
Examples:
  gigpo replay runs/a 6                  steps from the newest checkpoint before it, up to 6
  gigpo replay runs/a 1 --to 25          the whole run, from the base model
  gigpo replay runs/a 6 --explain        what each group brings into the step
  gigpo replay runs/a 30 learner.steps=40
\b
Exit status: 0 all identical, 1 something differs, 2 a step cannot be replayed.
"""


@click.command(cls=Command, epilog=EXPORT_EPILOG)
@click.argument("source", type=RunPath(path_type=str, has_step=True), metavar="RUN[@STEP]")
@click.argument("destination", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--version", type=AT_LEAST_0, metavar="N", help="Export this published version.")
@click.option("--adapter", is_flag=True, help="Export LoRA adapters alone, in float32.")
@trust_option
def export_model(
    *, source: str, destination: Path, version: int | None, adapter: bool, trust: bool
) -> None:
    """Write the weights of a run as a new Hugging Face directory.

    It holds weights, configuration and tokenizer, for transformers and vLLM. RUN@STEP is the
    checkpoint after a learner step: its float32 weights are rounded to model.dtype, as those of its
    version were. LoRA adapters are merged into the base model. With --adapter only the adapters of
    a checkpoint or version are written, as peft and vLLM load them beside the base model. The
    printed digest is that of `cat DIR/*.safetensors | b3sum`. The run may be training meanwhile.
    """
    from store import parse_run_step

    run, step = parse_run_step(source)
    if version is not None and step is not None:
        raise click.UsageError(f"--version {version} and {source} are two models; give one of them")
    _check_and_trust(run, trusts=trust)

    import learner
    from store import RunLayout, check_own_directory, compile_elsewhere

    compile_elsewhere()
    layout = RunLayout.open(run)
    try:
        if destination.exists():
            raise UserError(f"{destination} exists; choose another directory, or remove it")
        # It may be another user's, but nothing on the way in a directory for all, nor a link.
        check_own_directory(destination.parent, may_be_anothers=True, is_made=False)
        destination.parent.mkdir(parents=True, exist_ok=True)
        check_own_directory(destination.parent, may_be_anothers=True)
        if adapter and version is not None:
            record = learner.find_version(layout, version)
            digest = learner.export_adapter_version(layout, record, dest=destination)
            exported = f"the adapters of version {version}, of learner step {record.learner_step}"
        elif adapter:
            step = learner.newest_checkpoint(layout) if step is None else step
            digest = learner.export_adapter(layout, step, dest=destination)
            exported = f"the adapters after learner step {step}"
        elif step is not None:
            digest = learner.export_checkpoint(layout, step, dest=destination)
            exported = f"the checkpoint after learner step {step}"
        else:
            record = learner.find_version(layout, version)
            digest = learner.export_version(layout, record, dest=destination)
            exported = f"version {record.version}, of learner step {record.learner_step}"
    except ValueError as error:  # of a model that transformers cannot load, for example
        raise UserError(str(error)) from error
    say(f"{destination}: {exported} of {layout.root}; digest {digest}")


@click.command(cls=Command, epilog=REPLAY_EPILOG)
@run_argument
@click.argument("step", type=AT_LEAST_1)
@settings_argument
@click.option("--to", type=AT_LEAST_1, metavar="STEP", help="Also replay all steps up to this one.")
@click.option("--explain", is_flag=True, help="Show what each group brings into the first step.")
@trust_option
def replay(
    *, run: Path, step: int, settings: tuple[str, ...], to: int | None, explain: bool, trust: bool
) -> int:
    """Train learner steps again and compare the weights bit for bit.

    The groups are those that the run stored. The digest of the weights has to be the published one,
    and the figures have to be the recorded ones. Replaying begins at the newest kept checkpoint
    before STEP, or else at the base model (learner.keep_every keeps more checkpoints), and compares
    the steps in between too. The run is only read, and may be training.

    KEY=VALUE gives settings that the run was continued with, learner.steps for example. run.json
    has only those of its first start.
    """
    _check_and_trust(run, trusts=trust)

    from store import compile_elsewhere

    compile_elsewhere()
    from learner import replay_steps

    try:
        is_same = replay_steps(
            run,
            first=step,
            last=step if to is None else to,
            settings=settings,
            explains=explain,
            console=plain_console(soft_wrap=False),
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    return 0 if is_same else DIFFERENT


def _check_and_trust(run: Path, *, trusts: bool) -> None:
    """Check the run before libraries are loaded that read its files, and trust it if asked.

    Those libraries would follow a link out of a stranger's run.
    """
    from store import RunLayout, trust

    RunLayout.open(run).check_no_links()
    if trusts:
        trust(run)
