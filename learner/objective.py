"""From a config to gigpo's Objective (which loss, which corrections, with which numbers) and its
AdvantageSettings.

    config = fill_defaults(config)     # every number in use is in the config; what does not go together is refused
    objective = objective_of(config.loss)

gigpo knows what its losses are used with and which of them go together, so neither is repeated here
or in configs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from configs import ConfigError, LossConfig, check_is_list
from gigpo import AGGREGATIONS, CORRECTIONS, DEFAULT_PAIRING, POLICY_LOSSES, Objective
from printable import did_you_mean


class Part(Protocol):
    """What losses, corrections and aggregations have in common: a record of numbers, some kind of
    it by a name.
    """

    name: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __init__(self, **numbers: float) -> None: ...


P = TypeVar("P", bound=Part)
_REGISTRIES: tuple[Mapping[str, type[Part]], ...] = (POLICY_LOSSES, CORRECTIONS, AGGREGATIONS)


def objective_of(loss: LossConfig) -> Objective:
    """The objective of a config; null is the usual. Raises ConfigError for what does not go
    together.
    """
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


def fill_defaults(config: Config) -> Config:
    """The config with every number and name of its loss written out, so that a run's record says
    what it was trained with.

    What has no finite number (no cap at all) stays null. Raises ConfigError as `objective_of` does.
    """
    loss = config.loss
    if loss.aggregation == "sequence_mean_token_sum_norm" and loss.norm_tokens is None:
        loss = replace(loss, norm_tokens=float(config.actors.max_response_tokens))
    objective = objective_of(loss)
    parts: list[Part] = [objective.policy, *objective.corrections, objective.aggregation]
    numbers = {item.name: getattr(part, item.name) for part in parts for item in fields(part)}
    written = replace(
        loss,
        corrections=[correction.name for correction in objective.corrections],
        aggregation=objective.aggregation.name,
        **{name: number for name, number in numbers.items() if math.isfinite(number)},
    )
    return replace(config, loss=written)


def advantage_settings(config: Config) -> AdvantageSettings:
    """What the config says about advantages."""
    return AdvantageSettings.of(config.algorithm)


def _known(key: str, name: str, registry: Mapping[str, type[P]]) -> type[P]:
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


def _check_all_used(loss: LossConfig, kinds: Sequence[type[Part]]) -> None:
    """A number that nothing reads would be taken for one that acts."""
    used = {item.name for kind in kinds for item in fields(kind)}
    owners: dict[str, list[str]] = {}
    for kind in (kind for registry in _REGISTRIES for kind in registry.values()):
        for item in fields(kind):
            owners.setdefault(item.name, []).append(kind.name)
    for name, owner_names in owners.items():
        if name not in used and getattr(loss, name) is not None:
            raise ConfigError(
                f"loss.{name}={getattr(loss, name):g} is a number of "
                f"{' and '.join(sorted(owner_names))}, not in use here "
                f"({', '.join(kind.name for kind in kinds)}); remove it"
            )
