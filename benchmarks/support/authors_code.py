"""Compare the estimators `graphgpo` and `g2po` with their authors' code, on random batches.

    python benchmarks/support/authors_code.py --verl-agent DIR --g2po DIR

DIR are checkouts: of verl-agent (github.com/langfengQ/verl-agent), with the recipe GraphGPO, and of
G2PO (github.com/Nala-YN/G2PO). Either is enough. Their functions are run from there, once as they
are and once with float64 for each float32. What their modules import for other purposes (verl,
networkx, matplotlib) is replaced. The figures are printed as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from gigpo import PUBLISHED_SETTINGS, compute_advantages
from tests.support.gigpo_oracle import Row, to_table

BATCHES = 300
WIN_REWARD, PENALTY = 10.0, PUBLISHED_SETTINGS.invalid_penalty  # a win pays 10 in G2PO's code
STEP_COSTS = (0.1, 0.2, 0.8)  # graph_gamma, as in GraphGPO's scripts
NORMALISATIONS = {"mean": "mean_norm", "mean_std": "mean_std_norm"}  # ours -> theirs
NOT_NEEDED = (
    "verl",
    "networkx",
    "matplotlib",
    "matplotlib.pyplot",
    "matplotlib.patches",
    "matplotlib.cm",
    "matplotlib.colors",
)
OFF = 1e-3  # rows that differ by more are counted
NO_SIGN = {torch.float32: 1e-4, torch.float64: 1e-7}  # an advantage of this size may be rounding

# From a batch's rows, their name of a normalisation and graph_gamma to an advantage for each row.
Theirs = Callable[[Sequence[Row], str, float], np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--verl-agent", type=Path, metavar="DIR")
    parser.add_argument("--g2po", type=Path, metavar="DIR")
    given = parser.parse_args()
    if not (given.verl_agent or given.g2po):
        parser.error("give a checkout of their code: --verl-agent DIR, --g2po DIR or both")
    sys.modules |= {name: MagicMock() for name in NOT_NEEDED}
    figures = {}
    if given.verl_agent:
        figures["graphgpo"] = compare("graphgpo", lambda: graphgpo_of(given.verl_agent))
    if given.g2po:
        figures["g2po"] = compare("g2po", lambda: g2po_of(given.g2po))
    print(json.dumps(figures))


def random_batch(rng: random.Random) -> list[Row]:
    """Return 1 to 4 groups of 2 to 8 trajectories of 1 to 12 steps, won or not, trajectory by
    trajectory, with a reward at the end only.
    """
    rows = []
    for group in range(rng.randint(1, 4)):
        for member in range(rng.randint(2, 8)):
            n_steps, won = rng.randint(1, 12), rng.random() < 0.5
            n_states = rng.choice([3, 8, 30])
            for step in range(n_steps):
                is_last = step == n_steps - 1
                rows.append(
                    Row(
                        group=group,
                        trajectory=100 * group + member,
                        step=step,
                        reward=WIN_REWARD if won and is_last else 0.0,
                        valid=rng.random() < 0.85,
                        state=rng.randrange(n_states),
                        won=won,
                        final_state=rng.randrange(n_states) if is_last else None,
                    )
                )
    return rows


def compare(estimator: str, load: Callable[[], Theirs]) -> dict[str, object]:
    """Return figures of the differences, for both of their arithmetics."""
    figures: dict[str, object] = {"batches": BATCHES}
    for dtype in (torch.float32, torch.float64):
        largest, n_rows, n_off, n_signs = 0.0, 0, 0, 0
        with default_dtype(dtype):
            theirs = load()
            for number in range(BATCHES):
                rng = random.Random(number)
                graph_gamma = rng.choice(STEP_COSTS)
                rows = random_batch(rng)
                n_rows += len(rows)
                for normalise, mode in NORMALISATIONS.items():
                    settings = replace(
                        PUBLISHED_SETTINGS,
                        estimator=estimator,
                        normalise=normalise,
                        graph_gamma=graph_gamma,
                    )
                    ours_R = compute_advantages(to_table(rows), settings)["advantage"].to_numpy()
                    with contextlib.redirect_stdout(io.StringIO()):
                        theirs_R = theirs(rows, mode, graph_gamma)
                    apart_R = np.abs(ours_R - theirs_R)
                    assert np.isfinite(apart_R).all()
                    largest = max(largest, float(apart_R.max()))
                    n_off += int((apart_R > OFF).sum())
                    has_sign_R = np.maximum(np.abs(ours_R), np.abs(theirs_R)) > NO_SIGN[dtype]
                    n_signs += int((has_sign_R & (np.sign(ours_R) != np.sign(theirs_R))).sum())
        figures["rows"] = n_rows
        figures[str(dtype).removeprefix("torch.")] = {
            "largest_difference": float(f"{largest:.1e}"),
            f"advantages_off_by_{OFF:g}": n_off,
            "signs_that_differ": n_signs,
        }
    return figures


def graphgpo_of(root: Path) -> Theirs:
    """Load GraphGPO's functions from a checkout of verl-agent."""
    loaded("gigpo.core_gigpo", root / "gigpo" / "core_gigpo.py")
    code = loaded("core_graph", root / "recipe" / "GraphGPO" / "core_graph.py")

    def advantages(rows: Sequence[Row], mode: str, graph_gamma: float) -> np.ndarray:
        batch = batch_of(rows)
        graphs = code.ComplexGraph.from_data(batch)
        code.ComplexGraph.Calculate_all_shortest_path(graphs)
        returns_R = code.compute_graph_path_returns(batch, graphs, graph_gamma, False)
        names = batch.non_tensor_batch
        scores_R1 = batch.batch["scores"]
        found_R1, _ = code.compute_graphgpo_outcome_advantage(
            scores_R1,
            returns_R - batch.batch["penalties"],
            torch.ones_like(scores_R1),
            names["anchor_obs"],
            names["uid"],
            names["traj_uid"],
            mode=mode,
        )
        return found_R1[:, 0].double().numpy()

    return advantages


def g2po_of(root: Path) -> Theirs:
    """Load G2PO's functions from a checkout of it."""
    code = loaded("core_g2po", root / "g2po" / "core_g2po.py")

    def advantages(rows: Sequence[Row], mode: str, _graph_gamma: float) -> np.ndarray:
        batch = batch_of(rows)
        values_R, node_R, next_node_R = code.compute_group_aggregation_values(batch)
        names = batch.non_tensor_batch
        scores_R1 = batch.batch["scores"]
        found_R1, _ = code.compute_g2po_outcome_advantage(
            scores_R1,
            values_R,
            torch.ones_like(scores_R1),
            names["uid"],
            names["traj_uid"],
            node_R,
            next_node_R,
            names["is_action_valid"],
            mode=mode,
        )
        return found_R1[:, 0].double().numpy()

    return advantages


def batch_of(rows: Sequence[Row]) -> SimpleNamespace:
    """Return the columns that their functions read, as verl's DataProto has them.

    A response has one token. `scores` [R, 1] and `penalties` [R] are ours: their trainer makes the
    former of rewards and penalties, and subtracts the latter from step returns.
    """
    total: dict[int, float] = {}
    for row in rows:
        total[row.trajectory] = total.get(row.trajectory, 0.0) + row.reward
    following = []
    for row, later in zip(rows, [*rows[1:], None], strict=True):
        if later is not None and later.trajectory == row.trajectory:
            following.append(str(later.state))
        else:
            following.append("success" if row.won else str(row.final_state))
    valid_R = np.array([row.valid for row in rows])
    penalties_R = torch.tensor(np.where(valid_R, 0.0, PENALTY)).to(torch.get_default_dtype())
    returns_R = np.array([total[row.trajectory] for row in rows])
    scores_R1 = (torch.tensor(returns_R).to(penalties_R.dtype) - penalties_R)[:, None]
    return SimpleNamespace(
        batch={
            "input_ids": torch.zeros_like(scores_R1),
            "responses": torch.zeros_like(scores_R1),
            "scores": scores_R1,
            "penalties": penalties_R,
        },
        non_tensor_batch={
            "episode_rewards": returns_R,
            "rewards": np.array([row.reward for row in rows]),
            "active_masks": np.ones(len(rows)),
            "is_action_valid": valid_R,
            "uid": np.array([row.group for row in rows], object),
            "traj_uid": np.array([row.trajectory for row in rows], object),
            "anchor_obs": np.array([str(row.state) for row in rows], object),
            "next_obs": np.array(following, object),
            "text_actions": np.array(["a"] * len(rows), object),
        },
    )


def loaded(name: str, path: Path) -> ModuleType:
    """Run a file of theirs as a module, in torch's default dtype."""
    source = path.read_text()
    if torch.get_default_dtype() == torch.float64:
        source = source.replace("float32", "float64")
    sys.modules[name] = module = ModuleType(name)
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


if __name__ == "__main__":
    main()
