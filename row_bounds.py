"""Bound the values of a stored step: environments, actors and imports refuse what is beyond.

    MAX_REWARD                   # size of a reward and of a task_score, as stored
    MAX_SEED                     # size of a task's seed
    MAX_CHARACTERS["task_id"]    # length of a text, by its column
    MAX_EPISODE_BYTES            # of texts, tokens and pixels

A row beyond them is refused where it is made or imported. Once stored it would come back at every
start. An episode with more bytes is truncated. This module imports nothing of the project, so that
every package may import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

# After the factor `env.win_reward`. A return of 1,000 such rewards is 1e15. Learning squares it,
# and float32 ends at 3e38.
MAX_REWARD: Final = 1e12
MAX_SEED: Final = 2**63 - 1  # int64
# Names go into the catalog, once for each group, and into its index.
MAX_NAME_CHARACTERS: Final = 4096
# All texts of an observation together. Each step stays in memory until its episode is written.
MAX_OBSERVATION_CHARACTERS: Final = 64 * 2**20
# Bytes of all images of one observation.
MAX_PIXEL_BYTES: Final = 2**28
# An episode is truncated at the step with which it has as many bytes of texts, tokens and pixels.
# Arrow keeps 2 GiB of them in one column of a file, and an episode is never divided.
MAX_EPISODE_BYTES: Final = 2**29
# Columns with the texts of observations and actions, which may be long.
TEXT_COLUMNS: Final = (
    *("obs_text", "anchor_text", "admissible_actions", "action_text"),
    *("final_observation", "final_anchor_text", "final_admissible_actions"),
)
MAX_CHARACTERS: Final[Mapping[str, int]] = MappingProxyType(
    {
        **dict.fromkeys(("env_name", "task_id", "split", "finish_reason"), MAX_NAME_CHARACTERS),
        **dict.fromkeys(TEXT_COLUMNS, MAX_OBSERVATION_CHARACTERS),
    }
)
