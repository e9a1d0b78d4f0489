"""Make gigpo's Objective from the settings of a loss.

    objective = objective_of(config.loss)

gigpo knows which corrections and aggregation a loss is usually used with, and which go together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from configs import ConfigError, LossConfig, check_is_list
from gigpo import AGGREGATIONS, CORRECTIONS, DEFAULT_PAIRING, POLICY_LOSSES, Objective
from printable import did_you_mean

AUTO = "auto"  # the usual corrections, or the usual aggregation, of the loss
NUMBERS = "loss.numbers"
T = TypeVar("T")


def objective_of(loss: LossConfig) -> Objective:
    """Return the objective of a config. Raises ConfigError for parts that do not go together."""
    policy = _known("policy", loss.policy, registry=POLICY_LOSSES)
    usual_corrections, usual_aggregation = DEFAULT_PAIRING[loss.policy]
    check_is_list("loss.corrections", loss.corrections)
    names = usual_corrections if loss.corrections == [AUTO] else loss.corrections
    corrections = [_known("corrections", name, registry=CORRECTIONS) for name in names]
    chosen = usual_aggregation if loss.aggregation == AUTO else loss.aggregation
    aggregation = _known("aggregation", chosen, registry=AGGREGATIONS)
    kinds = [policy, *corrections, aggregation]
    _check_numbers(loss, used=dict(zip([loss.policy, *names, chosen], kinds, strict=True)))
    try:
        return Objective(
            policy=_made(policy, loss, name=loss.policy),
            corrections=tuple(
                _made(kind, loss, name=name) for kind, name in zip(corrections, names, strict=True)
            ),
            aggregation=_made(aggregation, loss, name=chosen),
            proximal=loss.proximal,
            kl=loss.kl,
            kl_coef=loss.kl_coef,
            entropy_coef=loss.entropy_coef,
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"loss.{error}") from None


def _known(key: str, name: str, *, registry: Mapping[str, type[T]]) -> type[T]:
    if name not in registry:
        raise ConfigError(
            f"loss.{key}={name!r} is none of {', '.join(registry)}{did_you_mean(name, registry)}"
        )
    return registry[name]


def _made(kind: type[T], loss: LossConfig, *, name: str) -> T:
    """Return the part `name` of an objective, with the config's numbers for it."""
    try:
        return kind(**loss.numbers.get(name, {}))
    except ValueError as error:
        raise ConfigError(f"{NUMBERS}.{name}.{error}") from None


def _check_numbers(loss: LossConfig, used: Mapping[str, type]) -> None:
    """Refuse a number that has no effect, because it would be taken for one that has."""
    registries: tuple[Mapping[str, Any], ...] = (POLICY_LOSSES, CORRECTIONS, AGGREGATIONS)
    known: dict[str, list[str]] = {}
    for registry in registries:
        for name, kind in registry.items():
            known[name] = [field.name for field in dataclasses.fields(kind)]
    for name, numbers in loss.numbers.items():
        if name not in known:
            raise ConfigError(
                f"{NUMBERS}.{name} is no loss, correction or aggregation{did_you_mean(name, known)}"
            )
        for number, value in numbers.items():
            if number not in known[name]:
                raise ConfigError(
                    f"{NUMBERS}.{name}.{number} is unknown; {name} has "
                    f"{', '.join(known[name]) or 'no numbers'}"
                )
            if name not in used:
                raise ConfigError(
                    f"{NUMBERS}.{name}.{number}={value:g} does nothing: {name} is not in use here "
                    f"({', '.join(used)}); leave it out"
                )
    for name, kind in used.items():
        for field in dataclasses.fields(kind):
            if field.default is dataclasses.MISSING and field.name not in loss.numbers.get(
                name, {}
            ):
                raise ConfigError(f"{name} needs {NUMBERS}.{name}.{field.name}")
