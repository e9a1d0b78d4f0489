"""Advantages in plain Python float64, row by row and from the definitions: what the SQL is compared
with.

Shares no code and no shortcut with gigpo/: statistics run over rows (not over trajectories' two
scores), keys are tuples, distances are Bellman's and Ford's, and what differs is decided by exact
decimals (so rewards here are short decimals).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal

import pyarrow as pa

from gigpo import AdvantageSettings

EPSILON = 1e-6
Value = float | None  # None: must be exactly 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    group: int
    trajectory: int
    step: int
    reward: float
    valid: bool
    state: int | None
    version: int = 0
    weight: float = 1.0
    won: bool = False
    actions: tuple[str, ...] | None = ()
    key: str | None = None
    # of the observation after the trajectory's last action; in its last row
    final_state: int | None = None
    final_actions: tuple[str, ...] | None = None
    final_key: str | None = None
    value: float = 0.0


def to_table(rows: Sequence[Row]) -> pa.Table:
    def uid(n: int | None) -> bytes | None:
        return None if n is None else n.to_bytes(16, "big")

    return pa.table(
        {
            "group_uid": pa.array([uid(r.group) for r in rows], pa.binary(16)),
            "traj_uid": pa.array([uid(r.trajectory) for r in rows], pa.binary(16)),
            "step_index": pa.array([r.step for r in rows], pa.int32()),
            "reward": pa.array([r.reward for r in rows], pa.float64()),
            "is_action_valid": pa.array([r.valid for r in rows], pa.bool_()),
            "state_hash": pa.array([uid(r.state) for r in rows], pa.binary(16)),
            "version_min": pa.array([r.version for r in rows], pa.int64()),
            "weight": pa.array([r.weight for r in rows], pa.float64()),
            "won": pa.array([r.won for r in rows], pa.bool_()),
            "admissible_actions": pa.array([r.actions for r in rows], pa.list_(pa.string())),
            "anchor_key": pa.array([r.key for r in rows], pa.string()),
            "final_state_hash": pa.array([uid(r.final_state) for r in rows], pa.binary(16)),
            "final_admissible_actions": pa.array(
                [r.final_actions for r in rows], pa.list_(pa.string())
            ),
            "final_anchor_key": pa.array([r.final_key for r in rows], pa.string()),
            "value": pa.array([r.value for r in rows], pa.float64()),
        }
    )


def by_trajectory_and_group(
    rows: Sequence[Row],
) -> tuple[dict[int, list[Row]], dict[int, list[Row]]]:
    """Return the rows by trajectory, in step order, and by group, in the given order."""
    trajectories: dict[int, list[Row]] = defaultdict(list)
    groups: dict[int, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.step):
        trajectories[row.trajectory].append(row)
    for row in rows:
        groups[row.group].append(row)
    return trajectories, groups


def oracle(rows: Sequence[Row], s: AdvantageSettings) -> list[tuple[Value, Value, Value]]:
    """(A_E, A_S, A) of every row."""
    trajectories, groups = by_trajectory_and_group(rows)
    total = {name: undiscounted(steps) for name, steps in trajectories.items()}
    score = {place(r): total[r.trajectory] - (0.0 if r.valid else s.invalid_penalty) for r in rows}
    if s.estimator == "graphgpo":
        returns = graph_returns(groups, trajectories, s)
    else:
        returns = {}
        for steps in trajectories.values():
            running = 0.0
            for row in reversed(steps):  # eq. 5
                running = row.reward + s.gamma * running
                returns[place(row)] = running
    unpenalised = returns
    returns = {place(r): returns[place(r)] - (0.0 if r.valid else s.invalid_penalty) for r in rows}

    episode = {place(r): episode_term(r, groups[r.group], score, trajectories, s) for r in rows}
    if s.estimator.startswith("reinforce"):
        episode = whitened(episode, trajectories, s)
    if s.estimator == "hgpo":
        step = hierarchical(trajectories, returns, s, rows)
    elif s.estimator == "turn_ppo":
        values = {place(row): row.value for row in rows}
        step = whitened_rows(estimates(rows, trajectories, values, s))
    elif s.estimator == "ppo":
        step = whitened_rows({place(row): score[place(row)] - row.value for row in rows})
    elif s.estimator in ("gigpo", "graphgpo", "g2po", "gagpo"):
        keyed = [(r, anchor(r, trajectories[r.trajectory], groups[r.group], s)) for r in rows]
        if s.estimator == "g2po":
            step = g2po_terms(keyed, trajectories, total, s)
        elif s.estimator == "gagpo":
            step = gagpo_terms(keyed, trajectories, unpenalised, s)
        else:
            step = step_terms(keyed, returns, s)
    else:
        step = {place(r): None for r in rows}
    omega = s.omega if s.estimator in ("gigpo", "graphgpo", "g2po") else 1.0
    return [
        (episode[p], step[p], (episode[p] or 0.0) + omega * (step[p] or 0.0))  # eq. 8
        for p in map(place, rows)
    ]


def differences(rows: Sequence[Row], s: AdvantageSettings) -> list[tuple[bool, bool, bool]]:
    """(episodes_differ, steps_differ, has_penalties) of every row, in exact decimals. Not for
    graphgpo, g2po and gagpo, whose step terms compare other quantities than returns.
    """
    trajectories, groups = by_trajectory_and_group(rows)
    exact: dict[tuple[int, int], Decimal] = {}
    for steps in trajectories.values():
        running = Decimal(0)
        for row in reversed(steps):
            running = exact[place(row)] = (
                Decimal(repr(row.reward)) + Decimal(repr(s.gamma)) * running
            )
    total = {
        name: sum(Decimal(repr(row.reward)) for row in steps)
        for name, steps in trajectories.items()
    }
    has_step_term = s.estimator == "hgpo" or (s.estimator == "gigpo" and s.omega > 0)
    met: dict[Hashable, set[Decimal]] = defaultdict(set)
    keys = {place(r): anchor(r, trajectories[r.trajectory], groups[r.group], s) for r in rows}
    for row in rows:
        met[keys[place(row)]].add(exact[place(row)])
    return [
        (
            len({total[other.trajectory] for other in groups[row.group]}) > 1,
            has_step_term and keys[place(row)] is not None and len(met[keys[place(row)]]) > 1,
            s.invalid_penalty > 0 and not all(other.valid for other in groups[row.group]),
        )
        for row in rows
    ]


def place(row: Row) -> tuple[int, int]:
    return row.trajectory, row.step


def undiscounted(steps: Sequence[Row]) -> float:
    total = 0.0
    for row in reversed(steps):
        total = row.reward + total
    return total


def episode_term(
    row: Row, members: list[Row], score: dict, trajectories: dict, s: AdvantageSettings
) -> Value:
    """Eq. 3 and its relatives, over the rows of one group."""
    if s.estimator in ("hgpo", "gagpo", "turn_ppo", "ppo"):
        return None
    x = score[place(row)]
    if s.estimator == "reinforce_pp":
        return x
    by_trajectory = s.weighting == "trajectories"
    names = {r.trajectory for r in members}
    n = len(names) if by_trajectory else len(members)
    standardise = s.normalise == "mean_std" and s.estimator in ("gigpo", "grpo", "graphgpo", "g2po")
    if n == 1:
        return x / (1 + EPSILON) if standardise else x
    values = [score[place(r)] for r in members]
    if max(values) == min(values):
        return None
    mean_of = {
        name: math.fsum(score[place(r)] for r in trajectories[name]) / len(trajectories[name])
        for name in names
    }
    if s.estimator == "rloo" or (
        s.normalise == "leave_one_out" and s.estimator in ("gigpo", "grpo", "graphgpo", "g2po")
    ):
        if by_trajectory:
            return x - math.fsum(mean_of[name] for name in names if name != row.trajectory) / (
                n - 1
            )
        return x - (math.fsum(values) - x) / (n - 1)
    mean = math.fsum(mean_of.values()) / n if by_trajectory else math.fsum(values) / n
    if not standardise:
        return x - mean
    share = [1 / len(trajectories[r.trajectory]) if by_trajectory else 1.0 for r in members]
    variance = math.fsum(u * (v - mean) ** 2 for u, v in zip(share, values, strict=True)) / (n - 1)
    return (x - mean) / (math.sqrt(variance) + EPSILON)


def whitened(episode: dict, trajectories: dict, s: AdvantageSettings) -> dict:
    value = {p: v or 0.0 for p, v in episode.items()}
    if len(value) == 1 or max(value.values()) == min(value.values()):
        return dict.fromkeys(value)
    share = {p: 1.0 if s.weighting == "steps" else 1 / len(trajectories[p[0]]) for p in value}
    n = len(value) if s.weighting == "steps" else len(trajectories)
    if n == 1:
        return dict.fromkeys(value)
    mean = math.fsum(share[p] * v for p, v in value.items()) / n
    variance = math.fsum(share[p] * (v - mean) ** 2 for p, v in value.items()) / (n - 1)
    return {p: (v - mean) / math.sqrt(variance + 1e-8) for p, v in value.items()}


def anchor(
    row: Row, trajectory: list[Row], group: list[Row], s: AdvantageSettings
) -> Hashable | None:
    """Eq. 6: what must be equal for two steps to be compared; None compares with nothing."""
    bucket = None
    if s.anchor_versions == "window":
        bucket = (max(r.version for r in group) - row.version) // (s.version_window + 1)
    if s.anchor == "anchor_key":
        return None if row.key is None else (row.group, bucket, row.key)
    if row.state is None:
        return None
    if s.anchor == "state_and_actions":
        if row.actions is None:
            return None
        return row.group, bucket, row.state, frozenset(row.actions)
    if s.anchor == "suffix":
        return suffix(row, trajectory, min(s.anchor_history, row.step + 1), bucket)
    return row.group, bucket, row.state


def suffix(row: Row, trajectory: list[Row], length: int, bucket: int | None) -> Hashable | None:
    states = tuple(r.state for r in trajectory[row.step + 1 - length : row.step + 1])
    return None if None in states else (row.group, bucket, states)


def step_terms(
    keyed: list[tuple[Row, Hashable | None]], returns: dict, s: AdvantageSettings, ddof: int = 1
) -> dict:
    """Eq. 7, over the rows of each key."""
    members: dict[Hashable, list[Row]] = defaultdict(list)
    for row, key in keyed:
        if key is not None:
            members[key].append(row)
    return {
        place(row): None if key is None else step_term(row, members[key], returns, s, ddof)
        for row, key in keyed
    }


def step_term(
    row: Row, members: list[Row], returns: dict, s: AdvantageSettings, ddof: int
) -> Value:
    values = [returns[place(r)] for r in members]
    weights = [r.weight if s.anchor_versions == "weighted" else 1.0 for r in members]
    # means that should be equal differ by rounding
    tolerance = 1e-9 if s.estimator in ("g2po", "gagpo") else 0.0
    if max(values) - min(values) <= tolerance:
        return None
    total = math.fsum(weights)
    mean = math.fsum(w * v for w, v in zip(weights, values, strict=True)) / total
    centred = returns[place(row)] - mean
    if s.normalise == "mean":
        return centred
    if s.normalise == "leave_one_out":
        others = [
            (w, v)
            for w, v, r in zip(weights, values, members, strict=True)
            if r.trajectory != row.trajectory
        ]
        if not others:
            return None
        return returns[place(row)] - math.fsum(w * v for w, v in others) / math.fsum(
            w for w, _ in others
        )
    divisor = total - ddof * math.fsum(w * w for w in weights) / total
    variance = (
        math.fsum(w * (v - mean) ** 2 for w, v in zip(weights, values, strict=True)) / divisor
    )
    return centred / (math.sqrt(variance) + EPSILON)


def hierarchical(
    trajectories: dict, returns: dict, s: AdvantageSettings, rows: Sequence[Row]
) -> dict:
    """HGPO: suffixes of 1, 2, ... states, weighed by their length + 1, where there is something to
    compare.
    """
    newest = {
        group: max(r.version for r in rows if r.group == group) for group in {r.group for r in rows}
    }
    levels = []
    for length in range(1, s.anchor_history + 1):
        keyed = []
        for row in rows:
            window = s.anchor_versions == "window"
            bucket = (newest[row.group] - row.version) // (s.version_window + 1) if window else None
            if length <= row.step + 1:
                keyed.append((row, suffix(row, trajectories[row.trajectory], length, bucket)))
        levels.append((length + 1, step_terms(keyed, returns, s, ddof=0)))
    result: dict[tuple[int, int], Value] = {}
    for p in map(place, rows):
        terms = [(w, level[p]) for w, level in levels if abs(level.get(p) or 0.0) > 1e-9]
        result[p] = sum(w * a for w, a in terms) / sum(w for w, _ in terms) if terms else None
    return result


def graph_returns(groups: dict, trajectories: dict, s: AdvantageSettings) -> dict:
    """10 * graph_gamma ^ (steps from the next state to success). From where success cannot be
    reached it is one step further than from the farthest state.
    """
    whole = replace(s, anchor_versions="mixed")  # the graph is of all versions
    result: dict[tuple[int, int], float] = {}
    for members in groups.values():
        following: dict[tuple[int, int], Hashable] = {}
        node: dict[tuple[int, int], Hashable] = {}
        for name in {r.trajectory for r in members}:
            last = trajectories[name][-1]
            final = replace(
                last,
                step=last.step + 1,
                state=last.final_state,
                actions=last.final_actions,
                key=last.final_key,
            )
            path = [*trajectories[name], final]
            nodes = [anchor(row, path, members, whole) or place(row) for row in path]
            if any(row.won for row in path):
                nodes[-1] = "success"
            for row, here, there in zip(path, nodes, nodes[1:], strict=False):
                node[place(row)], following[place(row)] = here, there
        # Bellman-Ford: as many rounds as an exact distance can have steps
        distance: dict[Hashable, float] = dict.fromkeys(
            [*node.values(), *following.values()], math.inf
        )
        distance["success"] = 0
        for _ in members:
            for p, there in following.items():
                distance[node[p]] = min(distance[node[p]], distance[there] + 1)
        far = max(d for d in distance.values() if d < math.inf)
        for p, there in following.items():
            steps = distance[there] if distance[there] < math.inf else far + 1
            result[p] = 10 * s.graph_gamma**steps
    return result


def node_values(
    keyed: list[tuple[Row, Hashable | None]], outcome: dict[tuple[int, int], float]
) -> dict[tuple[int, int], float]:
    """Mean outcome of the steps with the same key; a step without a key is alone."""
    met: dict[Hashable, list[float]] = defaultdict(list)
    for row, key in keyed:
        met[place(row) if key is None else ("key", key)].append(outcome[place(row)])
    return {
        place(row): math.fsum(values) / len(values)
        for row, key in keyed
        for values in [met[place(row) if key is None else ("key", key)]]
    }


def g2po_terms(
    keyed: list[tuple[Row, Hashable | None]],
    trajectories: dict[int, list[Row]],
    total: dict[int, float],
    s: AdvantageSettings,
) -> dict:
    """The next state's value within the anchor group, and the temporal difference within the
    task group.
    """
    outcome = {
        place(r): s.gamma ** (len(trajectories[r.trajectory]) - r.step) * total[r.trajectory]
        for r, _ in keyed
    }
    value = node_values(keyed, outcome)
    wins: dict[int, list[float]] = defaultdict(list)
    for steps in trajectories.values():
        if steps[0].won:
            wins[steps[0].group].append(total[steps[0].trajectory])
    following = {}
    for row, _ in keyed:
        if row.step + 1 < len(trajectories[row.trajectory]):
            following[place(row)] = value[row.trajectory, row.step + 1]
        elif row.won:
            following[place(row)] = math.fsum(wins[row.group]) / len(wins[row.group])
        else:
            following[place(row)] = 0.0
    penalised = {
        place(r): following[place(r)] - (0.0 if r.valid else s.invalid_penalty) for r, _ in keyed
    }
    gain = {p: following[p] - value[p] for p in following}
    local = step_terms(keyed, penalised, s)
    everywhere = step_terms([(row, row.group) for row, _ in keyed], gain, s)
    return {p: (local[p] or 0.0) + (everywhere[p] or 0.0) for p in following}


def gagpo_terms(
    keyed: list[tuple[Row, Hashable | None]],
    trajectories: dict[int, list[Row]],
    returns: dict[tuple[int, int], float],
    s: AdvantageSettings,
) -> dict:
    """Sums of all later temporal differences, each decayed by gamma lambda a step."""
    value = node_values(keyed, returns)
    estimate = estimates([row for row, _ in keyed], trajectories, value, s)
    return step_terms([(row, row.group) for row, _ in keyed], estimate, s)


def estimates(
    rows: Sequence[Row],
    trajectories: dict[int, list[Row]],
    value: dict[tuple[int, int], float],
    s: AdvantageSettings,
) -> dict[tuple[int, int], float]:
    """Generalised advantage estimation: for each row a sum over its later ones, less its penalty."""
    estimate = {}
    for row in rows:
        steps = trajectories[row.trajectory]
        terms = []
        for later in steps[row.step :]:
            is_last = later.step + 1 == len(steps)
            after = 0.0 if is_last else value[later.trajectory, later.step + 1]
            error = later.reward + s.gamma * after - value[place(later)]
            terms.append((s.gamma * s.gae_lambda) ** (later.step - row.step) * error)
        estimate[place(row)] = math.fsum(terms) - (0.0 if row.valid else s.invalid_penalty)
    return estimate


def whitened_rows(estimate: dict) -> dict:
    """Estimates over the critic's values, whitened over the rows."""
    if len(estimate) == 1 or max(estimate.values()) == min(estimate.values()):
        return dict.fromkeys(estimate)
    mean = math.fsum(estimate.values()) / len(estimate)
    variance = math.fsum((v - mean) ** 2 for v in estimate.values()) / (len(estimate) - 1)
    return {p: (v - mean) / math.sqrt(variance + 1e-8) for p, v in estimate.items()}


def value_targets(rows: Sequence[Row], s: AdvantageSettings) -> list[float]:
    """Return a critic's targets, by definition: the mean of all n-step returns.

    Lambda decays the weight of each return.
    """
    trajectories, _ = by_trajectory_and_group(rows)
    targets = []
    for row in rows:
        steps = trajectories[row.trajectory][row.step :]
        n_step = []
        for n in range(1, len(steps) + 1):
            rewards = [s.gamma**k * steps[k].reward for k in range(n)]
            bootstrap = s.gamma**n * steps[n].value if n < len(steps) else 0.0
            n_step.append(math.fsum([*rewards, bootstrap]))
        weights = [(1 - s.gae_lambda) * s.gae_lambda**k for k in range(len(steps) - 1)]
        weights.append(s.gae_lambda ** (len(steps) - 1))
        targets.append(math.fsum(w * g for w, g in zip(weights, n_step, strict=True)))
    return targets
