"""Define Step and Trajectory, and their Arrow form: one row per step.

Tokens are the truth. The learner reads `prompt_ids`, `response_ids` and the log-probabilities that
they were sampled with. The texts are for people and for SQL.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pyarrow as pa

from row_bounds import MAX_REWARD
from store.errors import StoreError
from store.hashing import HASH_BYTES, valid_text

CHANNELS = 3  # red, green and blue of an image
TOKEN_BYTES, UTF8_BYTES = 4, 4  # of a token id or its log-probability; of a character, at most
UID_TYPE = pa.binary(HASH_BYTES)
TIME_TYPE = pa.timestamp("us", tz="UTC")
IMAGES_TYPE = pa.list_(
    pa.struct([("height", pa.int32()), ("width", pa.int32()), ("pixels", pa.binary())])
)

SEGMENT_SCHEMA = pa.schema(
    [
        ("traj_uid", UID_TYPE),
        ("group_uid", UID_TYPE),
        ("env_name", pa.string()),
        ("task_id", pa.string()),
        ("split", pa.string()),
        ("seed", pa.int64()),
        ("member", pa.int32()),
        ("won", pa.bool_()),
        ("task_score", pa.float64()),  # null where the environment has no graded score
        ("episode_steps", pa.int32()),
        ("step_index", pa.int32()),
        ("prompt_ids", pa.list_(pa.int32())),
        # cut from the prompt because of its token budget; null where it was not recorded
        ("prompt_dropped_turns", pa.int32()),
        ("prompt_dropped_tokens", pa.int32()),
        ("response_ids", pa.list_(pa.int32())),
        ("response_logprobs", pa.list_(pa.float32())),
        ("version_min", pa.int64()),
        ("version_max", pa.int64()),
        ("finish_reason", pa.string()),
        ("obs_text", pa.string()),
        ("anchor_text", pa.string()),  # null: the step has no anchor and forms a group of its own
        ("state_hash", UID_TYPE),  # null with anchor_text
        # null where the environment does not list them
        ("admissible_actions", pa.list_(pa.string())),
        ("action_text", pa.string()),
        ("reward", pa.float64()),
        ("is_action_valid", pa.bool_()),
        ("terminated", pa.bool_()),
        ("truncated", pa.bool_()),
        ("t_start", TIME_TYPE),
        ("gen_us", pa.int64()),
        ("env_us", pa.int64()),
        ("images", IMAGES_TYPE),  # null where the observation has none
        # The observation after the trajectory's last action: in the row of its last step, null in
        # the others, and where it is not known.
        ("final_observation", pa.string()),
        ("final_anchor_text", pa.string()),
        ("final_state_hash", UID_TYPE),
        ("final_admissible_actions", pa.list_(pa.string())),
    ]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepImage:
    """An image of an observation, before the model's resizing."""

    height: int
    width: int
    pixels: bytes  # height * width * 3: red, green, blue of each pixel, row by row from the top


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One observation and the action taken on it."""

    step_index: int  # 0..n-1 in its trajectory
    prompt_ids: tuple[int, ...]
    prompt_dropped_turns: int | None  # earlier turns cut from the prompt; None: not recorded
    prompt_dropped_tokens: int | None  # tokens cut from the prompt, in all; None: not recorded
    response_ids: tuple[int, ...]
    # one for each of response_ids, as sampled (after temperature and filters)
    response_logprobs: tuple[float, ...]
    version_min: int  # oldest and newest policy version that sampled a token of this response
    version_max: int
    finish_reason: str
    obs_text: str
    anchor_text: str | None  # identifies the state; None: no other step can share it
    state_hash: bytes | None  # state_hash(anchor_text)
    admissible_actions: tuple[str, ...] | None  # as the environment listed them; None: it does not
    action_text: str
    reward: float
    is_action_valid: bool
    terminated: bool
    truncated: bool
    t_start_us: int  # UTC epoch: when generation was requested
    gen_us: int
    env_us: int
    images: tuple[StepImage, ...] = ()  # in the order of the prompt

    @property
    def max_bytes(self) -> int:
        """Return a bound on the bytes of its texts, tokens and pixels in Arrow's columns."""
        texts = (self.obs_text, self.anchor_text or "", self.action_text)
        n_tokens = len(self.prompt_ids) + 2 * len(self.response_ids)  # and log-probabilities
        return (
            sum(map(_most_bytes, texts))
            + sum(map(_most_bytes, self.admissible_actions or ()))
            + TOKEN_BYTES * n_tokens
            + sum(len(image.pixels) for image in self.images)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FinalObservation:
    """The observation after a trajectory's last action, on which no action was taken."""

    text: str
    anchor_text: str | None  # identifies the state; None: it is not known
    state_hash: bytes | None  # state_hash(anchor_text)
    admissible_actions: tuple[str, ...] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """The ordered steps of one attempt at a task."""

    traj_uid: bytes  # 16 bytes, fixed before generation, so that a retry collides
    group_uid: bytes
    env_name: str
    task_id: str
    split: str  # "train", "heldout", or "imported": of another run, or an extra episode
    seed: int
    member: int  # 0..G-1 in its group
    won: bool
    task_score: float | None
    steps: tuple[Step, ...]
    final_observation: FinalObservation | None = None  # None: not known

    @property
    def n_steps(self) -> int:
        return len(self.steps)

    @property
    def episode_return(self) -> float:
        """Return the undiscounted sum of the rewards."""
        return sum(step.reward for step in self.steps)

    @property
    def max_bytes(self) -> int:
        """Return a bound on the bytes of its texts, tokens and pixels in Arrow's columns."""
        n_bytes = sum(step.max_bytes for step in self.steps)
        final = self.final_observation
        if final is not None:
            texts = (final.text, final.anchor_text or "", *(final.admissible_actions or ()))
            n_bytes += sum(map(_most_bytes, texts))
        return n_bytes

    @property
    def version_min(self) -> int:
        return min(step.version_min for step in self.steps)

    @property
    def version_max(self) -> int:
        return max(step.version_max for step in self.steps)

    @property
    def invalid_steps(self) -> int:
        return sum(not step.is_action_valid for step in self.steps)


def _most_bytes(text: str) -> int:
    """Return a bound on the bytes of a text in UTF-8, without a look at each character."""
    return len(text) if text.isascii() else UTF8_BYTES * len(text)


def _wide(kind: pa.DataType) -> pa.DataType:
    """Return the type in which texts and bytes have offsets of 64 bits."""
    if pa.types.is_string(kind):
        return pa.large_string()
    if pa.types.is_binary(kind):
        return pa.large_binary()
    if pa.types.is_list(kind):
        return pa.list_(_wide(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_wide(field.type)) for field in kind])
    return kind


# For rows of several files together: Arrow joins no 2 GiB of texts or pixels with 32 bits.
WIDE_SCHEMA = pa.schema([field.with_type(_wide(field.type)) for field in SEGMENT_SCHEMA])


def to_table(trajectories: Sequence[Trajectory]) -> pa.Table:
    """Return rows of SEGMENT_SCHEMA, one per step, in the order given.

    Raises StoreError for a trajectory that is not well formed.
    """
    for trajectory in trajectories:
        _check_shape(trajectory)
    rows = [(trajectory, step) for trajectory in trajectories for step in trajectory.steps]
    columns = [_column(field, rows) for field in SEGMENT_SCHEMA]
    table = pa.Table.from_arrays(columns, schema=SEGMENT_SCHEMA)
    _check_finite(table)
    return table


_TRAJECTORY_COLUMNS = frozenset(
    ["traj_uid", "group_uid", "env_name", "task_id", "split", "seed", "member", "won", "task_score"]
)
_RENAMED = {"t_start": "t_start_us"}
_FINAL_COLUMNS = {
    "final_observation": "text",
    "final_anchor_text": "anchor_text",
    "final_state_hash": "state_hash",
    "final_admissible_actions": "admissible_actions",
}
_HASH_WITH_TEXT = "anchor_text and state_hash go together; set both"
_LIST_TYPECODES = {pa.list_(pa.int32()): "i", pa.list_(pa.float32()): "f"}


def uid_text(value: bytes) -> str:
    """Return a uid as the SQL views show it: 8-4-4-4-12 hex digits."""
    return str(uuid.UUID(bytes=value)) if len(value) == HASH_BYTES else value.hex()


def _check_shape(trajectory: Trajectory) -> None:
    name = uid_text(trajectory.traj_uid)
    if len(trajectory.traj_uid) != HASH_BYTES or len(trajectory.group_uid) != HASH_BYTES:
        raise StoreError(
            f"trajectory {name}: traj_uid and group_uid must be {HASH_BYTES} bytes; make them with "
            "uid()"
        )
    if not trajectory.steps:
        raise StoreError(
            f"trajectory {name} has no steps; an attempt without an action is not a trajectory"
        )
    for expected, step in enumerate(trajectory.steps):
        if problem := _problem(step, expected):
            raise StoreError(f"trajectory {name} step {expected}: {problem}")
    final = trajectory.final_observation
    if final is not None and (final.anchor_text is None) != (final.state_hash is None):
        raise StoreError(f"trajectory {name}, final observation: {_HASH_WITH_TEXT}")


def _problem(step: Step, expected: int) -> str:
    """Say in what the step is not well formed, and the fix. Empty if it is."""
    if step.step_index != expected:
        return (
            f"it has step_index {step.step_index}; they must be 0..n-1 in order, because returns "
            "are summed along them"
        )
    if len(step.response_ids) != len(step.response_logprobs):
        return (
            f"{len(step.response_ids)} response_ids but {len(step.response_logprobs)} "
            "response_logprobs; record one log-probability per sampled token"
        )
    for image in step.images:
        if len(image.pixels) != image.height * image.width * CHANNELS:
            return (
                f"an image of {image.height} x {image.width} has {len(image.pixels)} bytes; each "
                f"pixel is {CHANNELS}, red, green and blue"
            )
    if (step.anchor_text is None) != (step.state_hash is None):
        return _HASH_WITH_TEXT
    if step.version_min > step.version_max:
        return f"version_min {step.version_min} > version_max {step.version_max}"
    return ""


def _check_finite(table: pa.Table) -> None:
    import pyarrow.compute as pc  # a reader's child, which checks nothing, starts 30 ms earlier

    for name in ("response_logprobs", "reward", "task_score"):
        column = table[name]
        finite = pc.is_finite(pc.list_flatten(column) if pa.types.is_list(column.type) else column)
        if pc.all(finite).as_py() is False:
            raise StoreError(
                f"column {name} holds a NaN or an infinity; find the rollout that produced it"
            )
    for name in ("reward", "task_score"):
        largest = pc.max(pc.abs(table[name])).as_py()
        if largest is not None and largest > MAX_REWARD:
            raise StoreError(
                f"column {name} holds {largest:g} in size, above {MAX_REWARD:g}; scale it down in "
                "the environment"
            )


def _column(field: pa.Field, rows: Sequence[tuple[Trajectory, Step]]) -> pa.Array:
    name = field.name
    if name == "episode_steps":
        values: list[Any] = [trajectory.n_steps for trajectory, _ in rows]
    elif name in _TRAJECTORY_COLUMNS:
        values = [getattr(trajectory, name) for trajectory, _ in rows]
    elif name in _FINAL_COLUMNS:
        finals = [
            trajectory.final_observation if step is trajectory.steps[-1] else None
            for trajectory, step in rows
        ]
        attribute = _FINAL_COLUMNS[name]
        values = [None if final is None else getattr(final, attribute) for final in finals]
    else:
        attribute = _RENAMED.get(name, name)
        values = [getattr(step, attribute) for _, step in rows]
    if field.type == IMAGES_TYPE:
        values = list(map(_image_tuples, values))
    try:
        if typecode := _LIST_TYPECODES.get(field.type):
            return _lists(values, typecode=typecode, value_type=field.type.value_type)
        return _array(values, field.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, OverflowError, struct.error) as error:
        raise StoreError(f"column {name} does not hold {field.type} values: {error}") from error


def _image_tuples(images: Sequence[StepImage]) -> list[tuple[int, int, bytes]] | None:
    return [(image.height, image.width, image.pixels) for image in images] or None


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, kind)
    # Rare, so the values are examined one by one only now.
    except UnicodeEncodeError:
        return pa.array([_valid_texts(value) for value in values], kind)


def _valid_texts(value: Any) -> Any:
    """Make a text, or each text of a sequence, whole. Return other values as they are."""
    if isinstance(value, str):
        return valid_text(value)
    return [_valid_texts(item) for item in value] if isinstance(value, list | tuple) else value


def _lists(values: Sequence[Sequence[Any]], *, typecode: str, value_type: pa.DataType) -> pa.Array:
    """Build a list array from flat buffers.

    Most of a worker's encoding time is spent here. Packing each sequence by itself is three times
    as fast as any way through pyarrow, numpy or `array`.
    """
    lengths = list(map(len, values))
    packed = [struct.pack(f"{len(sequence)}{typecode}", *sequence) for sequence in values]
    flat = b"".join(packed)
    offsets = pa.array(accumulate(lengths, initial=0), pa.int32())
    items = pa.Array.from_buffers(value_type, sum(lengths), [None, pa.py_buffer(flat)])
    return pa.ListArray.from_arrays(offsets, items)
