"""Have vLLM's engine process answer requests: one future waits for each answer.

    requests = EngineRequests(llm, tokenizer=None, images=None)
    form = await requests.form(prompt, params)           # once for each temperature
    completion = await requests.answer(form, prompt, seed=7, version=3, adapter=None)

`AsyncLLM.generate` is made for streams of text. It checks the same parameters for every request,
and hands an answer through a stream, a detokenizer and six objects that nobody reads here. With a
small model that is half of the worker's CPU. The engine's process, the sockets and the task that
reads them stay vLLM's, and `AsyncLLM.generate` works beside this.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from actors.inference.vllm_images import engine_input
from actors.inference.vllm_preemptions import PreemptionCounter
from actors.policy import Completion, EngineLostError, Prompt
from actors.prompting.images import ImageForm

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer
    from vllm.v1.engine.output_processor import OutputProcessorOutput

STOPPED = "stop"
ENDS = (STOPPED, "length", "abort")  # vLLM's names


@dataclass(kw_only=True, slots=True)
class _Running:
    """A request without a whole answer, and its tokens so far."""

    completion: asyncio.Future[Completion]
    reader: IncrementalDetokenizer  # collects the tokens, and finds texts that end the answer
    version: int  # that was loaded when the request was made
    has_adapter: bool  # of that version, which then writes all tokens
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # that sampled the tokens

    def add(self, output: EngineCoreOutput, weight_version: str | None) -> str | None:
        """Add the tokens of an output. Return how the answer ends; None if it goes on."""
        # The engine's own version is that of the base model.
        if output.new_token_ids and weight_version is not None and not self.has_adapter:
            self.versions.append(int(weight_version))
        if output.new_logprobs is not None:
            self.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
        end = None if output.finish_reason is None else str(output.finish_reason)
        found = self.reader.update(output.new_token_ids, end == STOPPED)
        return STOPPED if found else end

    def finish(self, end: str) -> None:
        if self.completion.done():
            return
        if end not in ENDS:
            error = EngineLostError(f"the vLLM engine ended a request with {end!r}; see its log")
            self.completion.set_exception(error)
            return
        versions = self.versions or [self.version]  # empty if nothing was generated
        self.completion.set_result(
            Completion(
                token_ids=tuple(self.reader.output_token_ids),
                logprobs=tuple(self.logprobs),
                finish_reason=end,
                version_min=min(versions),
                version_max=max(versions),
            )
        )


class EngineRequests:
    """Send the requests of one engine, and take its answers. Unblocked by the engine's process.

    `tokenizer` reads the answers if texts may end them, else it is None. `images` is None for a
    model that sees none. `preemptions` counts them from the answers; None: others count them.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        *,
        tokenizer: Any,
        images: ImageForm | None,
        preemptions: PreemptionCounter | None = None,
    ) -> None:
        self._llm = llm
        self._preemptions = preemptions
        self._images = images
        self._tokenizer = tokenizer
        self._running: dict[str, _Running] = {}  # by request id
        self._numbers = itertools.count()
        outputs = llm.output_processor
        # Without it vLLM's own accounts would not see such an answer's end.
        outputs.tokenizer = tokenizer
        # vLLM's task that reads the sockets calls these two.
        self._vllms_process, self._vllms_fail = outputs.process_outputs, outputs.propagate_error
        outputs.process_outputs = self._process
        outputs.propagate_error = self._fail

    async def form(self, prompt: Prompt, params: SamplingParams) -> EngineCoreRequest:
        """Return a request with these parameters, checked by vLLM. Raises vLLM's errors."""
        return self._llm.input_processor.process_inputs(
            "form",
            engine_input(prompt, self._images),
            params,
            supported_tasks=await self._llm.get_supported_tasks(),
        )

    async def answer(
        self,
        form: EngineCoreRequest,
        prompt: Prompt,
        *,
        seed: int,
        version: int,
        adapter: LoRARequest | None,
    ) -> Completion:
        """Return the answer to `prompt` with the parameters of `form`.

        `adapter` is that of `version`; None: the engine's weights are.

        The request of a cancelled caller is aborted. Raises ValueError for a prompt that leaves no
        room for an answer, EngineLostError, and vLLM's errors.
        """
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        if self._llm.errored:
            raise self._llm.dead_error
        request = await self._request(form, prompt, seed=seed)
        request.lora_request = adapter
        running = _Running(
            completion=asyncio.get_running_loop().create_future(),
            reader=IncrementalDetokenizer.from_new_request(self._tokenizer, request),
            version=version,
            has_adapter=adapter is not None,
        )
        self._running[request.request_id] = running
        try:
            if self._llm.log_stats:
                self._count(request)
            await self._llm.engine_core.add_request_async(request)
            return await running.completion
        finally:
            if self._running.pop(request.request_id, None) is not None:  # it has no answer
                self._llm.output_processor.abort_requests([request.request_id], internal=True)
                await self._llm.engine_core.abort_requests_async([request.request_id])

    async def _request(
        self, form: EngineCoreRequest, prompt: Prompt, *, seed: int
    ) -> EngineCoreRequest:
        n_most = self._llm.model_config.max_model_len - 1
        if not 0 < len(prompt.token_ids) <= n_most:
            n_tokens = len(prompt.token_ids)
            raise ValueError(f"a prompt has {n_tokens} tokens, and this engine takes 1 to {n_most}")
        params = copy.copy(form.sampling_params)
        assert params is not None
        params.seed = seed  # without one, sampling depends on what else is in the batch
        request = copy.copy(form)
        request.request_id = request.external_req_id = f"answer-{next(self._numbers)}"
        request.prompt_token_ids = list(prompt.token_ids)
        request.sampling_params = params
        request.arrival_time = time.time()
        is_text = not prompt.images
        request.mm_features = None if is_text else (await self.form(prompt, params)).mm_features
        return request

    def _count(self, request: EngineCoreRequest) -> None:
        """Enter a request in vLLM's accounts, from which its statistics are made."""
        from vllm.v1.engine.output_processor import RequestOutputCollector

        assert request.sampling_params is not None
        unread = RequestOutputCollector(request.sampling_params.output_kind, request.request_id)
        self._llm.output_processor.add_request(request, None, queue=unread)

    def _process(
        self,
        outputs: list[EngineCoreOutput],
        timestamp: float | None = None,
        statistics: Any = None,
        weight_version: str | None = None,
    ) -> OutputProcessorOutput:
        """Take the answers out of the engine's outputs, and have vLLM process the others.

        vLLM processes all of them if it keeps statistics.
        """
        others: list[EngineCoreOutput] = []
        ended_by_text: list[str] = []
        for output in outputs:
            if self._preemptions is not None:
                self._preemptions.add(output.events)
            running = self._running.get(output.request_id)
            if running is None:
                others.append(output)
            elif end := running.add(output, weight_version):
                del self._running[output.request_id]
                running.finish(end)
                if not output.finished:
                    ended_by_text.append(output.request_id)
        processed = self._vllms_process(
            outputs if self._llm.log_stats else others, timestamp, statistics, weight_version
        )
        processed.reqs_to_abort += ended_by_text
        return processed

    def _fail(self, error: Exception) -> None:
        for running in self._running.values():
            if not running.completion.done():
                running.completion.set_exception(error)
        self._vllms_fail(error)
