"""Make gigpo's Objective from the settings of a loss.

    objective = objective_of(config.loss)

gigpo knows which corrections and aggregation a loss is usually used with, and which go together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from configs import ConfigError, LossConfig, check_is_list
from gigpo import AGGREGATIONS, CORRECTIONS, DEFAULT_PAIRING, POLICY_LOSSES, Objective
from printable import did_you_mean

AUTO = "auto"  # the usual corrections, or the usual aggregation, of the loss
T = TypeVar("T")


def objective_of(loss: LossConfig) -> Objective:
    """Return the objective of a config. Raises ConfigError for parts that do not go together."""
    policy = _known("policy", loss.policy, POLICY_LOSSES)
    usual_corrections, usual_aggregation = DEFAULT_PAIRING[loss.policy]
    check_is_list("loss.corrections", loss.corrections)
    names = usual_corrections if loss.corrections == [AUTO] else loss.corrections
    corrections = [_known("corrections", name, CORRECTIONS) for name in names]
    chosen = usual_aggregation if loss.aggregation == AUTO else loss.aggregation
    aggregation = _known("aggregation", chosen, AGGREGATIONS)
    _check_unread(loss, used=[loss.policy, *names, chosen])
    try:
        return Objective(
            policy=_made(policy, loss, loss.policy),
            corrections=tuple(
                _made(kind, loss, name) for kind, name in zip(corrections, names, strict=True)
            ),
            aggregation=_made(aggregation, loss, chosen),
            proximal=loss.proximal,
            kl=loss.kl,
            kl_coef=loss.kl_coef,
            entropy_coef=loss.entropy_coef,
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"loss.{error}") from None


def _known(key: str, name: str, registry: Mapping[str, type[T]]) -> type[T]:
    if name not in registry:
        raise ConfigError(
            f"loss.{key}={name!r} is none of {', '.join(registry)}{did_you_mean(name, registry)}"
        )
    return registry[name]


def _made(kind: type[T], loss: LossConfig, name: str) -> T:
    """Return the part of an objective with the numbers of its section, if it has one."""
    section: Any = getattr(loss, name, None)
    numbers = dataclasses.asdict(section) if section is not None else {}
    try:
        return kind(**numbers)
    except ValueError as error:
        raise ConfigError(f"loss.{name}.{error}") from None


def _check_unread(loss: LossConfig, *, used: Sequence[str]) -> None:
    """Refuse a changed number that has no effect, because it would be taken for one that has."""
    defaults = LossConfig()
    for item in dataclasses.fields(loss):
        section, default = getattr(loss, item.name), getattr(defaults, item.name)
        if item.name in used or not dataclasses.is_dataclass(section) or section == default:
            continue
        for number in dataclasses.fields(section):
            value = getattr(section, number.name)
            if value != getattr(default, number.name):
                raise ConfigError(
                    f"loss.{item.name}.{number.name}={value:g} does nothing: {item.name} is not "
                    f"in use here ({', '.join(used)}); leave it out"
                )
