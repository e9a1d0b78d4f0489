"""Put Weights & Biases, trackio and MLflow behind one interface.

    tracker = TRACKERS["wandb"](setup)
    tracker.log(7, {"train/success": 0.5})
    tracker.close()

Each runs in a process of its own (`tracker_process.py`), so it may set environment variables and
print. A resumed run goes on with the same run of the tracker, named by our run's id.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

PROJECT = "async-gigpo"
MLFLOW_PARAMETER_CHARACTERS = 6000  # MLflow's own bound for a value
MLFLOW_PARAMETERS = 100  # of one call, at most
RUN_ID_TAG = "gigpo.run_id"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackerSetup:
    """A run's identity, directory and settings for a tracker."""

    run_id: str
    run_name: str
    directory: str  # for its local files
    settings: Mapping[str, Any]  # of the run, without secrets
    n_logged: int  # calls of `log` in earlier starts


class Tracker(Protocol):
    """One run, as a tracker shows it."""

    def log(self, learner_step: int, values: Mapping[str, float]) -> None:
        """Show the values at a learner step. Steps may come out of order."""

    def close(self) -> None:
        """Write what is left, and end."""


class WandbTracker:
    """Weights & Biases: online after `wandb login`, or below the run with WANDB_MODE=offline."""

    def __init__(self, setup: TrackerSetup) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        directory = Path(setup.directory)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=setup.run_id,
            name=setup.run_name,
            dir=directory,
            resume="allow",
            config=dict(setup.settings),
            # No links below a run: its next start would refuse them.
            settings=wandb.Settings(
                symlink=False, console="off", disable_git=True, save_code=False, silent=True
            ),
        )
        _remove_links(directory / "wandb")
        self._run.define_metric("learner_step")
        self._run.define_metric("*", step_metric="learner_step")
        # Their step only grows. An evaluation ends later than its learner step, so the learner step
        # is a value, and their step counts the calls.
        self._n_logged = setup.n_logged

    def log(self, learner_step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "learner_step": learner_step}, step=self._n_logged)
        self._n_logged += 1

    def close(self) -> None:
        self._run.finish()


class TrackioTracker:
    """Log into trackio's SQLite file, or where its own environment variables say."""

    def __init__(self, setup: TrackerSetup) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(Path(setup.directory) / "trackio"))
        import trackio

        self._run = trackio.init(
            project=PROJECT,
            name=setup.run_id,
            resume="allow",
            config=dict(setup.settings),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, learner_step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=learner_step)

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """Log into MLflow's SQLite file below the run, or to MLFLOW_TRACKING_URI."""

    def __init__(self, setup: TrackerSetup) -> None:
        os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")  # git may not be installed
        from mlflow import MlflowClient
        from mlflow.entities import Param

        directory = Path(setup.directory).resolve()
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(tracking_uri=uri or f"sqlite:///{directory / 'mlflow.db'}")
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        artifacts = None if uri else (directory / "mlflow-artifacts").as_uri()
        found = self._client.get_experiment_by_name(name)
        if found:
            experiment = found.experiment_id
        else:
            experiment = self._client.create_experiment(name, artifact_location=artifacts)
        runs = self._client.search_runs(
            [experiment], filter_string=f"tags.`{RUN_ID_TAG}` = '{setup.run_id}'"
        )
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        run = self._client.create_run(
            experiment, run_name=setup.run_name, tags={RUN_ID_TAG: setup.run_id}
        )
        self._id = run.info.run_id
        parameters = [
            Param(key, str(value)[:MLFLOW_PARAMETER_CHARACTERS])
            for key, value in setup.settings.items()
        ]
        for start in range(0, len(parameters), MLFLOW_PARAMETERS):
            some = parameters[start : start + MLFLOW_PARAMETERS]
            self._client.log_batch(self._id, params=some)

    def log(self, learner_step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [Metric(name, value, now_ms, learner_step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


TRACKERS: Mapping[str, Callable[[TrackerSetup], Tracker]] = {
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
    "mlflow": MlflowTracker,
}
# Packages that pip installs for each.
PACKAGES = {
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}


def _remove_links(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_symlink():
            path.unlink()
