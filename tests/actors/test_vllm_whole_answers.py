"""Test that the parts of an answer are held back and joined, and which are not held back."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists

from actors.inference.vllm_whole_answers import WholeAnswers

WHOLE = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)


def part(request: str, token: int, *, reason: FinishReason | None = None) -> EngineCoreOutput:
    logprobs = LogprobsLists(np.array([[token]]), np.array([[-token / 8]]), np.array([0]))
    return EngineCoreOutput(request, [token], new_logprobs=logprobs, finish_reason=reason)


def requests(*names: str, params: SamplingParams = WHOLE) -> dict[str, SimpleNamespace]:
    return {name: SimpleNamespace(sampling_params=params) for name in names}


def test_an_answer_is_sent_at_its_end_with_all_its_tokens() -> None:
    whole = WholeAnswers()
    assert whole.add([part("a", 1), part("b", 2)], requests("a", "b")) == []
    assert whole.add([part("a", 3)], requests("a", "b")) == []
    (sent,) = whole.add([part("a", 4, reason=FinishReason.STOP), part("b", 5)], requests("b"))
    assert (sent.request_id, sent.new_token_ids) == ("a", [1, 3, 4])
    assert sent.finish_reason is FinishReason.STOP
    assert sent.new_logprobs is not None
    assert sent.new_logprobs.logprob_token_ids.tolist() == [[1], [3], [4]]
    assert sent.new_logprobs.logprobs.tolist() == [[-1 / 8], [-3 / 8], [-4 / 8]]
    assert sent.new_logprobs.sampled_token_ranks.tolist() == [0, 0, 0]


def test_tokens_before_new_weights_are_sent_apart_from_those_after() -> None:
    whole = WholeAnswers()
    whole.add([part("a", 1), part("b", 2)], requests("a", "b"))
    whole.add([part("a", 3)], requests("a", "b"))
    assert [sent.new_token_ids for sent in whole.take()] == [[1, 3], [2]]
    assert whole.take() == []
    (sent,) = whole.add([part("a", 4, reason=FinishReason.LENGTH)], requests("b"))
    assert sent.new_token_ids == [4]


def test_tokens_of_an_aborted_request_are_forgotten() -> None:
    whole = WholeAnswers()
    whole.add([part("a", 1), part("b", 2)], requests("a", "b"))
    whole.add([part("b", 3)], requests("b"))
    assert [sent.request_id for sent in whole.take()] == ["b"]


def test_tokens_are_sent_at_once_where_a_text_may_end_the_answer() -> None:
    whole, params = WholeAnswers(), SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)
    params.stop = ["</action>"]
    (sent,) = whole.add([part("a", 1)], requests("a", params=params))
    assert sent.new_token_ids == [1]
    assert whole.take() == []
