"""A run so small that every figure of a page can be worked out by hand.

Undiscounted returns count fully, each step halves them (gamma 0.5), advantages are differences from
the mean. The task "maze" is played twice. At version 1 four episodes start in the hall:

    member  in the hall  in the room  reward  returns: hall, room
    0, 1    open door    take gold    8       4, 8
    2       go back      (in the hall: wait)  0, 0
    3       open door    take dust    0       0, 0

So in the hall the mean return is 8/5 of five visits, in the room 16/3 of three. At version 3 both of
two episodes are won. The task "cave" is never won, and its texts are hostile.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from configs import Config
from gigpo import AdvantageSettings, advantages_macro
from store import (
    Catalog,
    FinalObservation,
    Group,
    RunLayout,
    StepImage,
    Trajectory,
    VersionRecord,
    export,
    state_hash,
    write_open_sql,
    write_segment,
)
from tests.support.store_samples import make_step, make_trajectory, open_task_group

HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e\u200b'\"&amp;$x{{7*7}}"
LONG = "x" * 1_000_000
# The bytes of "é" are the tokens 2 and 3. Token 4 is hostile.
VOCABULARY = {"take": 0, "Ġgold": 1, "Ã": 2, "©": 3, "<script>alert(1)</script>": 4, "Ċ": 5}
UNKNOWN_TOKEN = 99
WON = (("hall", "open door", 0.0), ("room", "take gold", 8.0))
BACK = (("hall", "go back", 0.0), ("hall", "wait", 0.0))
DUST = (("hall", "open door", 0.0), ("room", "take dust", 0.0))
CAVE = ((HOSTILE, HOSTILE, 0.0), (LONG, LONG, 0.0))
SETTINGS = dataclasses.replace(
    AdvantageSettings.of(Config().algorithm),
    gamma=0.5,
    omega=1.0,
    normalise="mean",
    invalid_penalty=0.0,
)


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(BPE(vocab=VOCABULARY, merges=[]))
    tokenizer.decoder = ByteLevel()
    return tokenizer


def make_worked_run(root: Path) -> RunLayout:
    """Write the run, with a tokenizer beside its newest weights."""
    layout = RunLayout.create(root, config_yaml="a: 1\n")
    with Catalog.open(layout) as catalog:
        write_open_sql(layout, macros=[advantages_macro(SETTINGS)], max_staleness=4)
        for version in range(4):
            catalog.record_version(
                VersionRecord(
                    version=version,
                    path=f"weights/v{version}",
                    digest=f"d{version}",
                    learner_step=version or None,
                )
            )
        play(layout, catalog, "maze", [WON, WON, BACK, DUST], version=1)
        play(layout, catalog, "cave", [CAVE], version=2)
        play(layout, catalog, "maze", [WON, WON], version=3)
        batch = catalog.claim(n_groups=3, current_version=3, max_staleness=4)
        assert batch is not None
        catalog.settle(batch.batch_id, learner_step=4, filtered={}, version_in=3)
        export(catalog, layout)
    for version, tokenizer in ((2, "damaged"), (3, make_tokenizer().to_str())):
        directory = layout.weights / f"v{version}"
        directory.mkdir(parents=True)
        (directory / "tokenizer.json").write_text(tokenizer)
    return layout


def play(
    layout: RunLayout,
    catalog: Catalog,
    task: str,
    episodes: list[tuple[tuple[str, str, float], ...]],
    *,
    version: int,
) -> None:
    group = open_task_group(catalog, task, size=len(episodes))
    played = [
        make_episode(group, member, steps, version=version) for member, steps in enumerate(episodes)
    ]
    catalog.commit(
        write_segment(layout, played, worker="w0", epoch=catalog.epoch), epoch=catalog.epoch
    )


def make_episode(
    group: Group, member: int, steps: tuple[tuple[str, str, float], ...], *, version: int
) -> Trajectory:
    is_won = any(reward for _, _, reward in steps)
    return dataclasses.replace(
        make_trajectory(group, member),
        won=is_won,
        task_score=None,
        steps=tuple(
            make_step(
                index,
                n_steps=len(steps),
                version=version,
                version_max=version + index,  # it changed while the second reply was written
                prompt_ids=(0, 1, 5, 0),
                prompt_dropped_turns=2 * index,
                prompt_dropped_tokens=30 * index,
                response_ids=(0, 1, 2, 3, 4, UNKNOWN_TOKEN),
                response_logprobs=(-0.0625, -0.5, -1.5, -2.5, -4.0, -0.0),
                obs_text=f"You are in the {place}.",
                anchor_text=place,
                state_hash=state_hash(place),
                admissible_actions=("open door", "go back", "jump"),
                action_text=action,
                reward=reward,
                is_action_valid=action != "wait",
                terminated=is_won and index == len(steps) - 1,
                truncated=not is_won and index == len(steps) - 1,
                gen_us=1_500_000,
                env_us=20_000,
                images=(StepImage(height=2, width=2, pixels=bytes(range(12))),)
                if index == 0
                else (),
            )
            for index, (place, action, reward) in enumerate(steps)
        ),
        final_observation=FinalObservation(
            text=f"You have left the {steps[-1][0]}.",
            anchor_text=None if is_won else "hall",
            state_hash=None if is_won else state_hash("hall"),
            admissible_actions=None,
        ),
    )
