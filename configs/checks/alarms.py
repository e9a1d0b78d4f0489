"""Check the section `alarms`."""

from __future__ import annotations

from configs.checks.values import VARIABLE
from configs.errors import ConfigError
from configs.schema import Config


def check_alarms(config: Config) -> None:
    """Refuse thresholds that would always warn, and a webhook that is no variable."""
    alarms = config.alarms
    if alarms.length_factor <= 1.0:
        raise ConfigError(
            f"alarms.length_factor={alarms.length_factor:g} would call every length a collapse; "
            "use more than 1, e.g. 4"
        )
    if alarms.ess_below > 1.0:
        raise ConfigError(
            f"alarms.ess_below={alarms.ess_below:g} would always warn: it is a fraction of the "
            "tokens; use at most 1, e.g. 0.1"
        )
    if alarms.webhook_env and not VARIABLE.fullmatch(alarms.webhook_env):
        raise ConfigError(  # the value is not shown: it may be the URL itself
            "alarms.webhook_env is no variable's name; give the name, e.g. GIGPO_WEBHOOK, never "
            "the URL itself"
        )
