"""Plays every held-out task with the newest weights of a run and prints the success: python evaluate.py RUN

The episodes go into the run's store like all others. Episodes that are already there are not played again.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

import configs
import report
import runs
from causes import ComponentFailed
from cluster import ray_cluster
from configs import ConfigError
from envs import EnvironmentFailed
from progress import Progress
from session import Session
from stopping import Interrupt
from store import RunLayout, StoreError, check_unowned


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="a run directory")
    options = parser.parse_args(arguments)
    Interrupt().listen()
    console = Console(highlight=False, soft_wrap=True)
    try:
        layout = RunLayout.open(Path(options.run))
        config = replace(configs.from_yaml(layout.info.config_yaml), run_dir=options.run)
        check_unowned(layout)
        base = Path(options.run) / "base" / "policy"
        model_path = config.model.path or str(base)
        with (
            runs.driving(Path(options.run)),
            ray_cluster(options.run),
            Session(
                config,
                model_path,
                learns=False,
                say=partial(console.print, markup=False),
                say_stopping=partial(runs.say_stopping, Path(options.run)),
            ) as session,
            Progress(config, "evaluating", console) as progress,
        ):
            session.evaluate(config.evaluation.final_episodes_per_task, progress.show)
        report.show(config, console)
    except (ConfigError, StoreError, EnvironmentFailed, ComponentFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        console.print(
            f"\n{str(stop) or 'stopped; no process was up'}. Go on with:  {shlex.join(['python', 'evaluate.py', options.run])}"
        )
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
