"""Compute updates with ranks that share the tokens of each micro-batch, in one process.

    # RANKS ranks; each writes OUT/rank<RANK>of<RANKS>.pt
    python -m tests.support.forked_ranks tests.support.sequence_cases RANKS RANKS ADDRESS BASES OUT

`shared_cases(place)` and `grouped_cases(place)` do the same with one rank in this process, which
then shares nothing.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from configs import LearnerConfig
from learner.distributed import deepspeed_setup
from learner.distributed.sequence_group import join_sequence_group
from learner.model.policy_model import load_policy
from tests.support.engine_samples import (
    CUT,
    all_trained,
    copied,
    cut,
    far_rows,
    history_rows,
    kept_bytes,
    random_rows,
    with_places,
)
from tests.support.rank_cases import CRITIC, LOSSES, Place, result
from tests.support.sizes import IN_FULL

LEARNER = LearnerConfig(learning_rate=1e-4)
STAGES = (0, 1, 2, 3) if IN_FULL else (0, 3)
ONE_KEY, TWO_KEYS, WINDOW = "one key", "two keys", "window"  # bases, by their attention
HEADS = 4
USED_LOSSES = tuple(LOSSES) if IN_FULL else ("m2po", "gspo")
# Bases and ZeRO stages by the ranks that share a micro-batch, 1 for the rank that is compared with.
ALL_GROUPED = tuple((name, stage) for name in (ONE_KEY, TWO_KEYS) for stage in STAGES)
GROUPED = {
    1: ALL_GROUPED,
    2: ALL_GROUPED if IN_FULL else ((TWO_KEYS, 0), (TWO_KEYS, 3)),
    4: ALL_GROUPED if IN_FULL else ((ONE_KEY, 3), (TWO_KEYS, 0)),
}
SIZES: dict[str, Any] = {
    "vocab_size": 280,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "dtype": "float32",
}


def make_bases(path: Path) -> Path:
    """Make models without biases, whose keys' gradients would be rounding alone."""
    torch.manual_seed(0)
    for name, n_keys in ((ONE_KEY, 1), (TWO_KEYS, 2)):
        config = LlamaConfig(num_key_value_heads=n_keys, **SIZES)
        LlamaForCausalLM(config).save_pretrained(path / name)
    windowed = MistralConfig(num_key_value_heads=2, sliding_window=4, **SIZES)
    MistralForCausalLM(windowed).save_pretrained(path / WINDOW)
    return path


def shared_cases(place: Place) -> dict[str, Any]:
    """Return the results of every kind of update."""
    kept, deepspeed_setup.WHOLE_ELEMENTS = deepspeed_setup.WHOLE_ELEMENTS, 0
    try:
        return (
            _three_updates(place)
            | _attentions(place)
            | _losses(place)
            | _critic(place)
            | _skipped(place)
            | _memory(place)
        )
    finally:
        deepspeed_setup.WHOLE_ELEMENTS = kept


def grouped_cases(place: Place) -> dict[str, Any]:
    """Return the results of two updates, the second with fewer rows than two groups of ranks."""
    found = {}
    for name, stage in GROUPED[place.sequence_parallel]:
        with _on(place, name).engine(
            learner=replace(LEARNER, zero_stage=stage), kl_coef=0.1, corrections=["m2po"]
        ) as engine:
            updates = [
                cut(far_rows(), CUT, ranks=place.groups),
                cut(random_rows(1), CUT, ranks=place.groups),
            ]
            found[f"groups {name} {stage}"] = result(engine, updates)
    return found


def _on(place: Place, name: str) -> Place:
    return replace(place, base=place.base / name)


def _three_updates(place: Place) -> dict[str, Any]:
    """At every ZeRO stage, with a reference and the entropy; at stage 0 also checkpointed layers,
    and without a trimmed last layer.
    """
    found = {}
    cases = [(f"stage {stage}", stage, False, True) for stage in STAGES]
    cases += [("checkpointed", 0, True, True), ("untrimmed", 0, False, False)]
    for name, stage, checkpointing, is_trimmed in cases:
        with _on(place, TWO_KEYS).engine(
            learner=replace(LEARNER, zero_stage=stage),
            gradient_checkpointing=checkpointing,
            kl_coef=0.1,
            entropy_coef=0.01,
        ) as engine:
            engine.policy.is_trimmed &= is_trimmed
            merged = cut(history_rows(), 2 * CUT, ranks=place.groups, merge_steps=True)
            others = cut(random_rows(7, seed=2), CUT, ranks=place.groups)
            one_row = cut(random_rows(1), CUT, ranks=place.groups)
            found[name] = result(engine, [merged, others, one_row])
            found[f"{name} scores"] = torch.cat(engine.score(merged))
    return found


def _attentions(place: Place) -> dict[str, Any]:
    """One head of keys for all queries, a window, and the shortest sequence there is."""
    found = {}
    for name in (ONE_KEY, WINDOW):
        with _on(place, name).engine(learner=LEARNER) as engine:
            found[name] = result(engine, [cut(random_rows(), CUT, ranks=place.groups)])
    shortest = random_rows(1).to_pydict()
    shortest |= {"prompt_ids": [[9]], "response_ids": [[8]], "response_logprobs": [[-5.6]]}
    rows = pa.table(shortest, schema=random_rows(1).schema)
    with _on(place, TWO_KEYS).engine(learner=LEARNER) as engine:
        found["one token"] = result(engine, [cut(rows, CUT, ranks=place.groups)])
    return found


def _losses(place: Place) -> dict[str, Any]:
    """Losses that need all tokens of an update or of a row, adapters, and a scaled learning rate."""
    found = {}
    cases = {name: LOSSES[name] for name in USED_LOSSES}
    for name, settings in (cases | {"adapters": {"lora_rank": 4, "kl_coef": 0.1}}).items():
        with _on(place, TWO_KEYS).engine(
            learner=replace(LEARNER, zero_stage=1, ess_scaled=name == "gspo"), **settings
        ) as engine:
            updates = [
                cut(far_rows(), CUT, ranks=place.groups),
                cut(random_rows(5, seed=1), CUT, ranks=place.groups),
            ]
            found[name] = result(engine, updates)
    return found


def _critic(place: Place) -> dict[str, Any]:
    """A critic of states, then of tokens, and its values of all tokens after both."""
    rows = history_rows()
    targets = pa.array([float(ids[0] % 5) for ids in rows["prompt_ids"].to_pylist()])
    valued = rows.append_column("value", pa.array([0.0] * len(rows)))
    valued = valued.append_column("value_target", targets)
    updates = [
        cut(table, CUT, ranks=place.groups, merge_steps=True)
        for table in (valued, with_places(valued))
    ]
    learner = replace(LEARNER, zero_stage=2)
    with _on(place, TWO_KEYS).engine(learner=learner, critic=CRITIC) as engine:
        return {
            "critic": engine.train_critic(updates),
            "critic values": torch.cat(engine.values(updates[0])),
        }


def _skipped(place: Place) -> dict[str, Any]:
    """A gradient that is not finite in the last rank's share of the tokens only."""
    good = cut(random_rows(), CUT, ranks=place.groups)
    with _on(place, TWO_KEYS).engine(learner=replace(LEARNER, zero_stage=2)) as engine:
        before = copied(engine)
        broken = next(engine.policy.parameters()).register_hook(
            lambda gradient: gradient * math.nan if place.rank == place.ranks - 1 else gradient
        )
        (skipped,) = engine.train([good])
        broken.remove()
        same = all(torch.equal(tensor, before[name]) for name, tensor in copied(engine).items())
        (after,) = engine.train([good])
    return {"skipped": (skipped.skipped, same, after.skipped, after.grad_norm)}


def _memory(place: Place) -> dict[str, int]:
    """Bytes that a backward pass keeps of 768 tokens on this rank, by the heads of keys."""
    found = {}
    group = join_sequence_group(
        LearnerConfig(ranks=place.ranks, sequence_parallel=place.sequence_parallel)
    )
    for name in (ONE_KEY, TWO_KEYS):
        policy = load_policy(
            place.base / name, dtype="float32", gradient_checkpointing=False, temperature=1.0
        )
        if group is not None:
            policy.share_tokens(group)
        many, few = (kept_bytes(policy, all_trained(n_rows)) for n_rows in (16, 4))
        found[f"kept {name}"] = many - few
    return found


def main() -> None:
    rank, ranks, address, bases, out = sys.argv[1:]
    place = Place(
        base=Path(bases), rank=int(rank), ranks=int(ranks), address=address, sequence_parallel=2
    )
    if place.groups == 1:
        found = shared_cases(place)
    else:
        found = {
            shared_by: grouped_cases(replace(place, sequence_parallel=shared_by))
            for shared_by in (2, 4)
        }
    torch.save(found, Path(out) / f"rank{rank}of{ranks}.pt")
