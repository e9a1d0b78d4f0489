"""Check `trackers` and `metrics_port`: where the metrics are shown."""

from __future__ import annotations

from configs.checks.values import check_is_list
from configs.errors import ConfigError
from configs.schema import Config
from printable import did_you_mean

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
LAST_PORT = 65535


def check_trackers(config: Config) -> None:
    """Check the names of trackers, and the port for Prometheus."""
    check_is_list("trackers", config.trackers)
    for name in config.trackers:
        if name not in TRACKERS:
            raise ConfigError(
                f"trackers={name!r} is not one of {', '.join(map(repr, TRACKERS))}"
                f"{did_you_mean(name, TRACKERS)}"
            )
    if len(set(config.trackers)) < len(config.trackers):
        raise ConfigError(
            f"trackers={config.trackers} has a tracker twice, which would show all points twice; "
            "name each once"
        )
    if config.metrics_port > LAST_PORT:
        raise ConfigError(
            f"metrics_port={config.metrics_port} is no port; use at most {LAST_PORT}, e.g. 9400"
        )
