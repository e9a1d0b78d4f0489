"""Measure where a core-second goes: CPU milliseconds per agent step, by component and function.

    python benchmarks/budget.py [--quick] [--folder runs/budget] [--data FOLDER] [--seconds 60]

The quick start trains from a finished base policy, as anybody runs it. Once it is past its first
learner steps, the CPU time of each of its processes (/proc/PID/stat) is read twice, `--seconds`
apart, and divided by the agent steps that began in between and were committed. Then py-spy looks
at the stacks of worker and engine, 200 times a second, without stopping them: the CPU time of each
thread is divided among the groups of functions that it was seen in. Last, each part is measured
alone on the same data (`support/floors.py`).

CPU time hardly depends on what else the machine does, unlike the steps per second.

--quick leaves out the run in lock-step with the learner (max_staleness=0) and ALFWorld, which also
needs --data, GIGPO_DATA or `data`, with a folder `alfworld`. Games and base policies are made on
the first call, in minutes, and kept in --folder. Each run knows the answers of the games that the
making of the base policy has asked for, and no others: it is a first run. With --again it knows
those of all earlier calls, too. The last line is JSON.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support.figures import quick_parser, show_json
from support.floors import measure_floors
from support.function_groups import GROUPS, group_of
from support.live_run import COMPONENTS, LiveRun

import store
from store import BASE_POLICY, now_us

ROOT = Path(__file__).resolve().parent.parent
WARM_UP_STEPS = 2  # learner steps
MOST_STEPS = 1000  # a run that ends by itself could not be looked at any more
MS_PER_S, US_PER_S = 1e3, 1e6
ALFWORLD_PACKAGES = ("alfworld", "fast_downward")
SHOWN_MS = 0.005  # a group that costs less is not shown
# components in the JSON line
JSON_NAMES = {"engine": "engine", "worker": "worker", "environment": "env"}
STEPS = """
SELECT count(*) AS n FROM steps
WHERE epoch_us(t_start) BETWEEN {begin_us} AND {end_us}"""
LEARNER_STEPS = """
SELECT epoch_us(max(trained_at)) AS ended_us FROM lineage WHERE batch_state = 'trained'
GROUP BY learner_step HAVING ended_us BETWEEN {begin_us} AND {end_us} ORDER BY 1"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    config: str
    settings: Mapping[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    steps_per_s: float
    learner_step_s: float | None  # None if fewer than two ended within the window
    component_ms: Mapping[str, float]  # per agent step
    group_ms: Mapping[str, Mapping[str, float]]  # component -> function group -> per agent step

    @property
    def total_ms(self) -> float:
        return sum(self.component_ms.values())


def main() -> None:
    parser = quick_parser(__doc__, quick="about a minute, once games and base policy are made")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "budget")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("GIGPO_DATA", "data")))
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    seconds = options.seconds or (15.0 if options.quick else 60.0)
    folder = options.folder.resolve()
    games = folder / "games"
    quick_start = Form(config="configs/quickstart.yaml", settings={"env.options.cache_dir": games})
    figures: dict[str, float | None] = {"async_over_sync_real": None}
    policy = base_policy("quickstart", quick_start, folder)
    if not (cloned := folder / "answers_of_cloning").is_dir():
        copy_answers(games / "answers", cloned)
    if not options.again:
        copy_answers(cloned, games / "answers")
    budget, floors = measure(quick_start, policy, seconds=seconds, profile_s=seconds / 2)
    show(budget, floors)
    figures |= json_figures(budget) | floors
    if not options.quick:
        if not options.again:
            copy_answers(cloned, games / "answers")
        in_turns, _ = measure(quick_start, policy, seconds=seconds, profile_s=0.0, max_staleness=0)
        if budget.learner_step_s and in_turns.learner_step_s:
            figures["async_over_sync_real"] = in_turns.learner_step_s / budget.learner_step_s
        figures |= alfworld(options.data.resolve(), folder, seconds=seconds)
    show_json(figures, figures)


def alfworld(data: Path, folder: Path, *, seconds: float) -> dict[str, float]:
    if not (data / "alfworld").is_dir():
        print(f"alfworld: left out, as there is no {data / 'alfworld'}; give --data or GIGPO_DATA")
        return {}
    if missing := [name for name in ALFWORLD_PACKAGES if find_spec(name) is None]:
        print(f"alfworld: left out, as {missing[0]} is not installed; pip install -e '.[alfworld]'")
        return {}
    settings = {"env.options.data": data / "alfworld", "model.tiny.clone_steps": 30}
    form = Form(config="configs/alfworld_cpu.yaml", settings=settings)
    policy = base_policy("alfworld", form, folder)
    budget, floors = measure(form, policy, seconds=seconds, profile_s=seconds / 2)
    show(budget, floors)
    return {f"alfworld_{name}": ms for name, ms in (json_figures(budget) | floors).items()}


def base_policy(name: str, form: Form, folder: Path) -> Path:
    """Return the form's base policy; make it on the first call, by a run of one learner step."""
    run_dir = folder / name
    policy = run_dir / BASE_POLICY
    if not policy.is_dir():
        print(f"making the base policy of {form.config}, in {run_dir}: minutes", flush=True)
        settings = {"learner.steps": 1, "evaluation.every": 0}
        settings |= {"evaluation.final_episodes_per_task": 1, "seed": 0}
        with LiveRun(run_dir, form.config, {**form.settings, **settings}) as run:
            run.wait()
    return policy


def copy_answers(source: Path, target: Path) -> None:
    """Replace a folder of kept answers by another one."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)


def measure(
    form: Form, policy: Path, *, seconds: float, profile_s: float, max_staleness: int = 2
) -> tuple[Budget, dict[str, float]]:
    """Train from `policy`; return the budget of `seconds` of it, and the floors."""
    settings = {
        **form.settings,
        "model.path": policy,
        "max_staleness": max_staleness,
        "evaluation.every": 0,
        "learner.steps": MOST_STEPS,
        "seed": 0,
    }
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name) / "run"
        with LiveRun(run_dir, form.config, settings) as run:
            run.wait_for_learner_step(WARM_UP_STEPS)
            begin_us, before_s = now_us(), run.cpu_s()
            time.sleep(seconds)
            end_us, after_s = now_us(), run.cpu_s()
            stacks = {}
            if profile_s:
                stacks = {name: run.profile(name, seconds=profile_s) for name in GROUPS}
            # The groups that the window cut are to be committed too.
            run.wait_for_learner_step(run.learner_step() + max_staleness + 1)
        window = {"begin_us": begin_us, "end_us": end_us}
        with store.open_run(str(run_dir)) as stored:
            n_steps = stored.sql(STEPS.format(**window))["n"][0].as_py()
            ends_us = stored.sql(LEARNER_STEPS.format(**window))["ended_us"].to_pylist()
        component_ms = {
            name: (after_s[name] - before_s[name]) / n_steps * MS_PER_S for name in COMPONENTS
        }
        if unseen := [name for name, ms in component_ms.items() if not ms]:
            raise RuntimeError(
                f"no process of the run was recognised as {unseen[0]}, so another component has "
                "its CPU time; see _component in support/live_run.py, or measure once more"
            )
        floors = measure_floors(run_dir, policy=policy, n_groups=32) if profile_s else {}
    budget = Budget(
        steps_per_s=n_steps / (end_us - begin_us) * US_PER_S,
        learner_step_s=mean_gap_s(ends_us),
        component_ms=component_ms,
        group_ms={name: shares(name, found, component_ms[name]) for name, found in stacks.items()},
    )
    return budget, floors


def mean_gap_s(ends_us: Sequence[int]) -> float | None:
    if len(ends_us) < 2:
        return None
    return (ends_us[-1] - ends_us[0]) / (len(ends_us) - 1) / US_PER_S


def shares(component: str, stacks: Counter[tuple[str, ...]], ms: float) -> dict[str, float]:
    """Divide a component's milliseconds among its function groups."""
    used_ns: Counter[str] = Counter()
    for stack, ns in stacks.items():
        used_ns[group_of(component, stack)] += ns
    return {group: ms * ns / used_ns.total() for group, ns in used_ns.most_common()}


def show(budget: Budget, floors: Mapping[str, float]) -> None:
    print(f"{budget.steps_per_s:.0f} agent steps/s, {budget.total_ms:.2f} ms of CPU for each")
    print(f"{'CPU ms per agent step':40} {'here':>8} {'alone':>8}")
    for name, ms in sorted(budget.component_ms.items(), key=lambda item: -item[1]):
        floor = floors.get(f"{JSON_NAMES.get(name, name)}_floor_ms")
        print(f"{name:40} {ms:8.3f} {'' if floor is None else f'{floor:8.3f}'}")
        for group, group_ms in budget.group_ms.get(name, {}).items():
            if group_ms > SHOWN_MS:
                print(f"    {group:36} {group_ms:8.3f}", flush=True)


def json_figures(budget: Budget) -> dict[str, float]:
    parts = {f"{JSON_NAMES.get(name, name)}_ms": ms for name, ms in budget.component_ms.items()}
    return {
        "agent_steps_per_s": budget.steps_per_s,
        "agent_steps_per_core_s": MS_PER_S / budget.total_ms,
        **parts,
    }


if __name__ == "__main__":
    main()
