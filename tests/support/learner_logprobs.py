"""The same tokens' log-probabilities twice: as an engine gave them when it sampled, and as the
learner finds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from actors.policy import Completion, Prompt
from learner.data.micro_batch import micro_batches
from learner.model.policy_model import load_policy
from tests.support.learner_samples import table


def both_logprobs(
    model: Path, played: Sequence[tuple[Prompt, Completion]], *, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(behaviour_N, learner_N), float32, of all response tokens in one order; the learner packs
    them as in training.
    """
    rows = table(
        *[(list(p.token_ids), list(c.token_ids), list(c.logprobs), 0.0) for p, c in played]
    )
    policy = load_policy(
        model, dtype="float32", gradient_checkpointing=False, temperature=temperature
    )
    batches = micro_batches(rows, micro_batch_tokens=4096, ranks=1)
    with torch.no_grad():
        learner_N = torch.cat([policy(batch)[0] for batch in batches])
    return torch.cat([batch.behaviour_logprobs_N for batch in batches]), learner_N
