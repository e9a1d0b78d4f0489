"""Compare the vLLM policy with a Hugging Face forward pass, through new weights and deaths."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

import store
import weight_pieces
from actors.concurrency import RequestGate
from actors.inference.vllm_policy import VLLMPolicy
from actors.inference.vllm_requests import EngineRequests
from actors.inference.weight_load import RECEIVED, WeightLoad
from actors.inference.weight_sync import LOADED, REFUSED, WeightSync
from actors.policy import Completion, EngineLostError, Prompt
from configs import ActorsConfig
from driver.run_lock import has_ended
from learner import write_weights
from learner.distributed.deepspeed_setup import LOOPBACK
from learner.publishing.broadcast_sender import Broadcast
from learner.publishing.publish import WeightsCopy
from store import (
    Catalog,
    RunLayout,
    VersionRecord,
    WeightFileError,
    broadcast,
    export,
    files_digest,
    write_open_sql,
)
from tests.support.chat_samples import two_turns_over_http
from tests.support.learner_logprobs import both_logprobs
from tests.support.processes import PATIENCE_S, children, litter, unused_shared_memory
from tests.support.served_model import VOCABULARY_SIZE, served_model

pytestmark = pytest.mark.engine

STOP_TOKEN = 7
RESPONSE_TOKENS = 48
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    loop: asyncio.AbstractEventLoop
    policy: VLLMPolicy
    directories: dict[str, Path]  # weights by name: base, other
    processes: int = 1  # over which each layer is split

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, timeout=120))


def make_model(path: Path, *, seed: int) -> Path:
    served_model(seed=seed).save_pretrained(path)
    return path


async def start(
    *, model: Path, log_path: Path, kv_cache_gib: float = 0.125, processes: int = 1
) -> VLLMPolicy:
    actors = ActorsConfig(
        max_response_tokens=RESPONSE_TOKENS,
        kv_cache_gib=kv_cache_gib,
        cpu_cores="auto",
        engine={} if processes == 1 else {"tensor_parallel_size": processes},
    )
    policy = VLLMPolicy(
        model_path=model,
        dtype="float32",
        lora=None,
        actors=actors,
        max_model_tokens=256,
        gate=RequestGate(16),
        stop_token_ids=[STOP_TOKEN],
        stop=(),
        tokenizer=None,
        log_path=log_path,
        statistics=False,
    )
    await policy.start()
    return policy


@contextlib.contextmanager
def serving(root: Path, *, log_path: Path, processes: int) -> Iterator[Served]:
    directories = {
        name: make_model(root / name, seed=seed) for name, seed in (("base", 0), ("other", 1))
    }
    environment_before = dict(os.environ)
    loop = asyncio.new_event_loop()
    others = set(engine_processes(os.getpid()))
    policy = loop.run_until_complete(
        start(model=directories["base"], log_path=log_path, processes=processes)
    )
    # nothing that was meant for the engine leaks to our other children
    assert dict(os.environ) == environment_before
    served = Served(loop=loop, policy=policy, directories=directories, processes=processes)
    started = set(engine_processes(os.getpid())) - others
    # The scheduler has a process of its own beside several.
    assert len(started) == (1 if processes == 1 else 1 + processes)
    yield served
    served.run(policy.close())
    # The processes of a split engine end when their parent has ended.
    _, alive = psutil.wait_procs(started, timeout=PATIENCE_S)
    assert not alive
    assert "vllm" in log_path.read_text()
    with pytest.raises(EngineLostError, match="closed"):
        served.run(policy.generate(prompt(0), seed=0, temperature=1.0))
    loop.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, engine_log: Path) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("vllm"), log_path=engine_log, processes=1) as one:
        yield one


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve with tensor parallelism, as an engine on several GPUs does."""
    root = tmp_path_factory.mktemp("split")
    with serving(root, log_path=root / "logs/engine.log", processes=2) as two:
        yield two


@pytest.fixture(params=["served", "split"], ids=["one process", "two processes"])
def either(request: pytest.FixtureRequest) -> Served:
    found: Served = request.getfixturevalue(request.param)
    return found


def prompt(seed: int, *, length: int = 120) -> Prompt:
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(8, VOCABULARY_SIZE, (length,), generator=generator).tolist()
    return Prompt(token_ids=tuple(token_ids), actions=None)


@functools.cache  # it is asked for hundreds of answers
def reference_model(path: Path) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def reference_logprobs(
    path: Path, *, prompt: Prompt, completion: Completion, temperature: float
) -> torch.Tensor:
    model = reference_model(path)
    ids_BT = torch.tensor([prompt.token_ids + completion.token_ids])
    with torch.no_grad():
        logits_TV = model(ids_BT).logits[0, len(prompt.token_ids) - 1 : -1]
    logprobs_TV = torch.log_softmax(logits_TV / temperature, dim=-1)
    return logprobs_TV.gather(1, ids_BT[0, len(prompt.token_ids) :, None])[:, 0]


def assert_logprobs_of(
    path: Path, *, prompt: Prompt, completion: Completion, temperature: float = 1.0
) -> None:
    expected_T = reference_logprobs(
        path, prompt=prompt, completion=completion, temperature=temperature
    )
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected_T, atol=1e-5, rtol=0)


def engine_processes(pid: int) -> list[psutil.Process]:
    """Find engines by name: vLLM renames its processes, unlike multiprocessing's helpers."""
    return children("VLLM", of=pid, recursive=True)


def digest_of(path: Path) -> str:
    return files_digest([path])


def load_weights(served: Served, name: str) -> Coroutine[Any, Any, WeightLoad]:
    path = served.directories[name]
    digest = digest_of(path / "model.safetensors")
    return served.policy.load_weights(version=served.policy.version + 1, path=path, digest=digest)


def generate_all(served: Served, *, seeds: range, temperature: float) -> list[Completion]:
    async def run() -> list[Completion]:
        calls = [served.policy.generate(prompt(s), seed=s, temperature=temperature) for s in seeds]
        return list(await asyncio.gather(*calls))

    return list(served.run(run()))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_a_hugging_face_forward_pass(either: Served, temperature: float) -> None:
    completions = generate_all(either, seeds=range(8), temperature=temperature)
    assert {c.finish_reason for c in completions} <= {"stop", "length"}
    for seed, completion in enumerate(completions):
        assert len(completion.logprobs) == len(completion.token_ids) <= RESPONSE_TOKENS
        assert (completion.version_min, completion.version_max) == (either.policy.version,) * 2
        assert_logprobs_of(
            either.directories["base"],
            prompt=prompt(seed),
            completion=completion,
            temperature=temperature,
        )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_learner_finds_the_same_logprobs(served: Served, temperature: float) -> None:
    completions = generate_all(served, seeds=range(8), temperature=temperature)
    played = [(prompt(seed), completion) for seed, completion in enumerate(completions)]
    behaviour_N, learner_N = both_logprobs(
        served.directories["base"], played, temperature=temperature
    )
    torch.testing.assert_close(behaviour_N, learner_N, atol=1e-5, rtol=0.0)


def test_stop_token_ends_the_completion_and_is_part_of_it(served: Served) -> None:
    completions = generate_all(served, seeds=range(32), temperature=1.0)
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert stopped, "48 draws from 256 tokens, 32 times: some must hit the stop token"
    assert all(c.token_ids.index(STOP_TOKEN) == len(c.token_ids) - 1 for c in stopped)
    assert all(
        STOP_TOKEN not in c.token_ids and len(c.token_ids) == RESPONSE_TOKENS
        for c in completions
        if c not in stopped
    )


def test_same_seed_same_tokens_alone_or_in_company(served: Served) -> None:
    alone = generate_all(served, seeds=range(3, 4), temperature=1.0)[0]
    in_company = generate_all(served, seeds=range(8), temperature=1.0)[3]
    other_seed = served.run(served.policy.generate(prompt(3), seed=99, temperature=1.0))
    assert alone.token_ids == in_company.token_ids
    assert alone.token_ids != other_seed.token_ids


def test_over_http_prompts_keep_their_tokens_and_logprobs_are_those_of_the_forward_pass(
    served: Served,
) -> None:
    one, two = served.run(two_turns_over_http(served.policy, max_model_tokens=256))
    assert (
        two.prompt_ids[: len(one.prompt_ids + one.response_ids)]
        == one.prompt_ids + one.response_ids
    )
    for step in (one, two):
        asked = Prompt(token_ids=step.prompt_ids, actions=None)
        said = Completion(
            token_ids=step.response_ids,
            logprobs=step.response_logprobs,
            finish_reason="stop",
            version_min=0,
            version_max=0,
        )
        expected_T = reference_logprobs(
            served.directories["base"], prompt=asked, completion=said, temperature=0.7
        )
        torch.testing.assert_close(torch.tensor(said.logprobs), expected_T, atol=1e-4, rtol=0)


def test_new_weights_are_used_also_for_a_prompt_seen_before(either: Served) -> None:
    seen = prompt(0, length=200)  # several blocks long: its keys and values are in the prefix cache
    before = either.run(either.policy.generate(seen, seed=5, temperature=1.0))
    assert_logprobs_of(either.directories["base"], prompt=seen, completion=before)
    load = either.run(load_weights(either, "other"))
    after = either.run(either.policy.generate(seen, seed=5, temperature=1.0))
    assert (
        load.version
        == either.policy.version
        == after.version_min
        == after.version_max
        > before.version_max
    )
    assert_logprobs_of(either.directories["other"], prompt=seen, completion=after)
    file = either.directories["base"] / "model.safetensors"
    back = either.run(
        either.policy.load_weights(version=load.version + 1, path=file, digest=digest_of(file))
    )
    again = either.run(load_weights(either, "base"))
    assert (
        again.file_digest
        == back.file_digest
        == blake3(file.read_bytes()).hexdigest()
        != load.file_digest
    )
    assert (
        either.run(either.policy.generate(seen, seed=5, temperature=1.0)).token_ids
        == before.token_ids
    )


def test_update_under_running_requests_drops_none(either: Served) -> None:
    first = either.policy.version

    async def run() -> list[Completion]:
        calls = [
            asyncio.ensure_future(either.policy.generate(prompt(s), seed=s, temperature=1.0))
            for s in range(64)
        ]  # more than the engine works on at once: most wait
        await asyncio.sleep(0.05)
        for _ in range(2):
            name = "other" if either.policy.version == first else "base"
            await load_weights(either, name)
        return list(await asyncio.gather(*calls))

    completions = list(either.run(run()))
    assert all(
        c.finish_reason in ("stop", "length") and len(c.token_ids) == len(c.logprobs) > 0
        for c in completions
    )
    assert all(first <= c.version_min <= c.version_max <= first + 2 for c in completions)
    assert any(c.version_min < c.version_max for c in completions)
    # all running requests were put back, which says nothing about the size of the cache
    assert either.run(either.policy.preempted()) == 0
    for seed, completion in enumerate(completions):
        if completion.version_min == completion.version_max:
            name = "other" if completion.version_min == first + 1 else "base"
            assert_logprobs_of(either.directories[name], prompt=prompt(seed), completion=completion)
        # every token is of one of both, over all tokens before it: nothing of the old weights
        # stayed in the cache
        else:
            sampled_T = torch.tensor(completion.logprobs)
            off_T = []
            for path in either.directories.values():
                expected_T = reference_logprobs(
                    path, prompt=prompt(seed), completion=completion, temperature=1.0
                )
                off_T.append((sampled_T - expected_T).abs())
            assert torch.minimum(*off_T).max() < 1e-5


def test_an_answer_is_one_message_for_each_version_and_its_spans_are_exact(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, first = served.policy._llm, served.policy.version
    assert llm is not None
    # by request: the version and the tokens of each message
    messages: defaultdict[str, list[tuple[int, list[int]]]] = defaultdict(list)

    def process(
        outputs: list[Any], timestamp: float, statistics: Any, *, weight_version: str
    ) -> Any:
        for output in outputs:
            messages[output.request_id].append((int(weight_version), list(output.new_token_ids)))
        return processed(outputs, timestamp, statistics, weight_version=weight_version)

    processed = llm.output_processor.process_outputs
    monkeypatch.setattr(llm.output_processor, "process_outputs", process)

    async def run() -> list[Completion]:
        calls = [
            asyncio.ensure_future(served.policy.generate(prompt(s), seed=s, temperature=1.0))
            for s in range(32)
        ]
        await asyncio.sleep(0.05)
        await load_weights(served, "other")
        return list(await asyncio.gather(*calls))

    before = served.run(load_weights(served, "base")).version
    completions = served.run(run())
    assert before == first + 1
    by_tokens = {sum((tuple(ids) for _, ids in sent), ()): sent for sent in messages.values()}
    assert {len(sent) for sent in messages.values()} == {1, 2}
    for seed, completion in enumerate(completions):
        sent = by_tokens[completion.token_ids]
        versions = [version for version, _ in sent]
        assert (completion.version_min, completion.version_max) == (versions[0], versions[-1])
        assert len(set(versions)) == len(sent)
        sampled_T, begin = torch.tensor(completion.logprobs), 0
        for version, token_ids in sent:
            path = served.directories["base" if version == before else "other"]
            expected_T = reference_logprobs(
                path, prompt=prompt(seed), completion=completion, temperature=1.0
            )
            span = slice(begin, begin + len(token_ids))
            torch.testing.assert_close(sampled_T[span], expected_T[span], atol=1e-5, rtol=0)
            begin = span.stop


def test_the_request_of_a_cancelled_caller_is_aborted(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = served.policy._llm
    assert llm is not None
    aborted: list[str] = []

    async def abort(request_ids: list[str]) -> None:
        aborted.extend(request_ids)
        await send(request_ids)

    send = llm.engine_core.abort_requests_async
    monkeypatch.setattr(llm.engine_core, "abort_requests_async", abort)

    async def run() -> None:
        calls = [
            asyncio.ensure_future(served.policy.generate(prompt(s), seed=s, temperature=1.0))
            for s in range(2)
        ]
        await asyncio.sleep(0)
        while not served.policy._requests._running:
            await asyncio.sleep(0)
        calls[0].cancel()
        assert (await calls[1]).finish_reason in ("stop", "length")
        assert calls[0].cancelled()

    served.run(run())
    assert len(aborted) == 1 and not served.policy._requests._running


def test_a_text_ends_the_answer_at_the_token_that_completes_it(served: Served) -> None:
    """vLLM keeps statistics too here: its accounts see the same end."""
    llm = served.policy._llm
    assert llm is not None
    whole = generate_all(served, seeds=range(4), temperature=1.0)
    words = [f"w{number:03}" for number in range(VOCABULARY_SIZE)]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(
            WordLevel({word: n for n, word in enumerate(words)}, unk_token="w000")
        )
    )
    outputs = llm.output_processor
    before = (outputs.process_outputs, outputs.propagate_error, outputs.tokenizer, llm.log_stats)
    requests = EngineRequests(llm, tokenizer=tokenizer, images=None)
    llm.log_stats = True

    async def run(seed: int) -> Completion:
        params = served.policy._sampling_params(1.0)
        params.detokenize, params.stop = True, [words[whole[seed].token_ids[2]]]
        form = await requests.form(prompt(seed), params)
        return await requests.answer(form, prompt(seed), seed=seed, version=0, adapter=None)

    try:
        for seed, answer in enumerate(whole):
            end = 1 + answer.token_ids.index(answer.token_ids[2])
            stopped = served.run(run(seed))
            assert stopped.token_ids == answer.token_ids[:end]
            assert stopped.logprobs == answer.logprobs[:end]
            assert stopped.finish_reason == "stop"
        assert not outputs.has_unfinished_requests()
    finally:
        outputs.process_outputs, outputs.propagate_error, outputs.tokenizer, llm.log_stats = before


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_preemptions_of_a_full_cache_are_counted_once(
    served: Served, engine_log: Path, processes: int
) -> None:
    async def run() -> tuple[list[Completion], int, int]:
        policy = await start(
            model=served.directories["base"],
            log_path=engine_log,
            kv_cache_gib=0.0005,  # for the longest request and a few others
            processes=processes,
        )
        try:
            calls = [policy.generate(prompt(s), seed=s, temperature=1.0) for s in range(16)]
            return list(await asyncio.gather(*calls)), *[await policy.preempted() for _ in "12"]
        finally:
            await policy.close()

    completions, n_preempted, n_again = served.run(run())
    for seed, completion in enumerate(completions):
        assert_logprobs_of(served.directories["base"], prompt=prompt(seed), completion=completion)
    assert n_preempted > 0
    assert n_again == 0


def test_weights_in_several_files_are_served(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Publish as the learner does with a large model; both sides agree on the digest."""
    monkeypatch.setattr("learner.publishing.publish.SHARD_BYTES", 100_000)
    tensors = load_file(served.directories["other"] / "model.safetensors")
    digest = write_weights(tensors.items(), tmp_path / "v1", source_dir=served.directories["base"])
    assert len(list((tmp_path / "v1").glob("*.safetensors"))) > 2
    load = served.run(
        served.policy.load_weights(
            version=served.policy.version + 1, path=tmp_path / "v1", digest=digest
        )
    )
    assert load.file_digest == digest
    completion = served.run(served.policy.generate(prompt(0), seed=5, temperature=1.0))
    assert_logprobs_of(served.directories["other"], prompt=prompt(0), completion=completion)
    served.run(load_weights(served, "base"))


def damaged(tmp_path: Path, whole: Path) -> dict[str, tuple[Path, str]]:
    """List ways in which published weights can be wrong, with the error of each."""
    tensors = load_file(whole)
    save_file(
        {n: t for n, t in tensors.items() if n != "model.norm.weight"},
        tmp_path / "lacking.safetensors",
    )
    save_file({n: t[:1].clone() for n, t in tensors.items()}, tmp_path / "misshapen.safetensors")
    save_file({n: t + 1e-3 for n, t in tensors.items()}, tmp_path / "other.safetensors")
    data = whole.read_bytes()
    (tmp_path / "torn.safetensors").write_bytes(data[:-100])
    (tmp_path / "flipped.safetensors").write_bytes(flipped(data))
    (tmp_path / "noise.safetensors").write_bytes(b"\0" * len(data))
    says = {
        "absent": "no weights at",
        "lacking": "model.norm.weight, of shape missing",
        "misshapen": "does not fit",
        "torn": "not a whole safetensors file",
        "noise": "not a whole safetensors file",
        "flipped": "has digest",
        "other": "has digest",
    }
    return {name: (tmp_path / f"{name}.safetensors", words) for name, words in says.items()}


def test_refused_weights_leave_the_old_version_serving(served: Served, tmp_path: Path) -> None:
    """Change weights under other requests too, which run on without a pause."""
    whole = served.directories["other"] / "model.safetensors"
    before, version = generate_all(served, seeds=range(8), temperature=1.0), served.policy.version

    async def refuse_all() -> list[Completion]:
        running = [
            asyncio.ensure_future(served.policy.generate(prompt(s), seed=s, temperature=1.0))
            for s in range(8)
        ]
        for path, words in damaged(tmp_path, whole).values():
            with pytest.raises(WeightFileError, match=words):
                await served.policy.load_weights(
                    version=version + 1, path=path, digest=digest_of(whole)
                )
        return list(await asyncio.gather(*running))

    assert served.run(refuse_all()) == before
    assert served.policy.version == version
    assert generate_all(served, seeds=range(8), temperature=1.0) == before
    assert served.run(load_weights(served, "other")).version == version + 1
    served.run(load_weights(served, "base"))


def test_a_published_version_whose_file_changes_is_refused_and_the_next_one_is_served(
    served: Served, tmp_path: Path
) -> None:
    """Follow weights from the learner to the engine's answers; then one bit of them is flipped."""
    layout = RunLayout.create(tmp_path / "run", config_yaml="")
    write_open_sql(layout, macros=[], max_staleness=1)
    first = served.policy.version + 1
    with Catalog.open(layout) as catalog:

        async def newest() -> VersionRecord | None:
            return catalog.latest_version()

        async def is_written(version: int) -> bool:
            return True

        async def record(what: str, detail: str) -> None:
            catalog.log(component="worker-0", what=what, detail=detail)

        def publish(version: int, name: str) -> None:
            tensors = load_file(served.directories[name] / "model.safetensors")
            digest = write_weights(
                tensors.items(), layout.weights_dir(version), source_dir=served.directories["base"]
            )
            path = layout.relative(layout.weights_dir(version))
            catalog.record_version(
                VersionRecord(version=version, path=path, digest=digest, learner_step=version)
            )

        def served_now() -> list[Completion]:
            served.run(weights.sync(catalog.latest_version()))
            return generate_all(served, seeds=range(4), temperature=1.0)

        coordinator = SimpleNamespace(newest_version=newest, is_written=is_written, record=record)
        weights = WeightSync(
            served.policy,
            layout,
            coordinator,  # type: ignore[arg-type]
            limits_loads=False,
            is_broadcast=False,
            max_staleness=1,
        )
        publish(first, "other")
        before = served_now()
        assert_logprobs_of(served.directories["other"], prompt=prompt(0), completion=before[0])
        publish(first + 1, "base")
        file = layout.weights_dir(first + 1) / "model.safetensors"
        file.write_bytes(flipped(file.read_bytes()))
        assert served_now() == before, "tokens, log-probabilities and the version they are of"
        publish(first + 2, "base")
        (after, *_) = served_now()
        assert_logprobs_of(served.directories["base"], prompt=prompt(0), completion=after)
        assert (before[0].version_max, after.version_min, served.policy.version) == (
            first,
            first + 2,
            first + 2,
        )
        export(catalog, layout)
    query = """SELECT what, (detail ->> 'version')::BIGINT AS version
               FROM events WHERE what LIKE 'weights %' ORDER BY lsn"""
    with store.open_run(layout.root) as reader:
        events = [tuple(row.values()) for row in reader.sql(query).to_pylist()]
    assert events == [(LOADED, first), (REFUSED, first + 1), (LOADED, first + 2)]


def test_weights_that_the_learner_sends_are_served_without_a_file(
    either: Served, tmp_path: Path
) -> None:
    """Weights that were sent to others only are not loaded; running requests go on."""
    sender, copy = Broadcast(LOOPBACK, device=torch.device("cpu")), WeightsCopy()
    first = either.policy.version + 1

    def send() -> None:
        with sender.round() as to_engines:
            copy.write(tmp_path / "sent", source_dir=either.directories["base"], send=to_engines)
        shutil.rmtree(tmp_path / "sent")

    async def run() -> tuple[WeightLoad | None, WeightLoad | None, list[Completion]]:
        tensors = load_file(either.directories["other"] / "model.safetensors")
        digest = copy.take(tensors.items())
        send()
        # nobody told the engine where
        before = await either.policy.load_received(version=first, digest=digest)
        await either.policy.join_broadcast(sender.address)
        while await asyncio.to_thread(sender._store.add, "joined", 0) < either.processes:
            await asyncio.sleep(0.01)
        calls = [
            asyncio.ensure_future(either.policy.generate(prompt(s), seed=s, temperature=1.0))
            for s in range(16)
        ]
        digest = copy.take(tensors.items())
        sending = asyncio.ensure_future(asyncio.to_thread(send))
        # An engine of several processes receives while it is asked for the weights.
        while (load := await either.policy.load_received(version=first, digest=digest)) is None:
            await asyncio.sleep(0.01)
        await sending
        assert await either.policy.load_received(version=first + 1, digest="of others") is None
        return before, load, list(await asyncio.gather(*calls))

    before, load, completions = either.run(run())
    assert before is None and load is not None and load.received
    assert load.version == either.policy.version == first
    assert load.file_digest == write_weights(
        load_file(either.directories["other"] / "model.safetensors").items(),
        tmp_path / "v",
        source_dir=either.directories["base"],
    )
    assert {c.finish_reason for c in completions} <= {"stop", "length"}
    after = either.run(either.policy.generate(prompt(0), seed=5, temperature=1.0))
    assert_logprobs_of(either.directories["other"], prompt=prompt(0), completion=after)
    # the thread is free again, and files work as before
    assert either.run(load_weights(either, "base")).received is False
    assert_logprobs_of(
        either.directories["base"],
        prompt=prompt(0),
        completion=either.run(either.policy.generate(prompt(0), seed=5, temperature=1.0)),
    )


def test_sent_weights_that_changed_on_the_way_are_not_served_and_their_files_are(
    either: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flip one bit of a tensor on its way to a real engine, which is in another process."""
    sender, copy = Broadcast(LOOPBACK, device=torch.device("cpu")), WeightsCopy()
    version, directory = either.policy.version + 1, tmp_path / "v"
    send_parts = weight_pieces.Link.send

    def flipping(link: weight_pieces.Link, parts: Sequence[memoryview]) -> None:
        data = b"".join(parts)
        is_file = len(data) > broadcast.PREAMBLE_BYTES
        send_parts(link, [memoryview(bytearray(flipped(data) if is_file else data))])

    monkeypatch.setattr(weight_pieces.Link, "send", flipping)

    def send() -> None:
        with sender.round() as to_engines:
            copy.write(directory, source_dir=either.directories["base"], send=to_engines)

    async def run() -> tuple[WeightLoad | None, Completion, WeightLoad]:
        await either.policy.join_broadcast(sender.address)
        while await asyncio.to_thread(sender._store.add, "joined", 0) < either.processes:
            await asyncio.sleep(0.01)
        tensors = load_file(either.directories["other"] / "model.safetensors")
        digest = copy.take(tensors.items())
        sending, received = asyncio.ensure_future(asyncio.to_thread(send)), None
        while received is None and not sending.done():
            received = await either.policy.load_received(version=version, digest=digest)
            await asyncio.sleep(0.01)
        await sending
        received = received or await either.policy.load_received(version=version, digest=digest)
        between = await either.policy.generate(prompt(0), seed=5, temperature=1.0)
        load = await either.policy.load_weights(version=version, path=directory, digest=digest)
        return received, between, load

    received, between, load = either.run(run())
    assert received is None and between.version_max == version - 1
    assert_logprobs_of(either.directories["base"], prompt=prompt(0), completion=between)
    assert load.received is False
    after = either.run(either.policy.generate(prompt(0), seed=5, temperature=1.0))
    assert_logprobs_of(either.directories["other"], prompt=prompt(0), completion=after)
    either.run(load_weights(either, "base"))


def flipped(data: bytes) -> bytes:
    """Flip one bit of the last weight but one."""
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


def test_a_file_that_is_removed_after_it_was_verified_is_loaded(
    served: Served, tmp_path: Path
) -> None:
    """The engine holds the file open from its first look, so its removal does no harm."""
    copy = Path(shutil.copytree(served.directories["other"], tmp_path / "v1"))
    verify = served.policy._verify

    async def verify_then_remove(*arguments: Any, **options: Any) -> None:
        await verify(*arguments, **options)
        shutil.rmtree(copy)

    served.policy._verify = verify_then_remove  # type: ignore[method-assign]
    digest = digest_of(copy / "model.safetensors")
    served.run(
        served.policy.load_weights(version=served.policy.version + 1, path=copy, digest=digest)
    )
    del served.policy._verify
    completion = served.run(served.policy.generate(prompt(0), seed=5, temperature=1.0))
    assert_logprobs_of(served.directories["other"], prompt=prompt(0), completion=completion)
    served.run(load_weights(served, "base"))


ORPHAN_MAKER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_vllm import start
async def main():
    policy = await start(model=Path({model!r}), log_path=Path({log!r}))
    print("serving", flush=True)
    await asyncio.sleep(600)
if __name__ == "__main__":
    asyncio.run(main())
"""


def test_killed_parent_leaves_no_engine(served: Served, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        ORPHAN_MAKER.format(
            tests=str(ROOT / "tests/actors"),
            model=str(served.directories["base"]),
            log=str(tmp_path / "log"),
        )
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    shared_memory_before = unused_shared_memory()
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        while "serving" not in parent.stdout.readline():
            assert parent.poll() is None, "the parent ended before it served"
        (engine,) = engine_processes(parent.pid)
        os.kill(parent.pid, signal.SIGKILL)
        deadline_s = time.monotonic() + PATIENCE_S
        while not (gone := has_ended(engine)) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        if not gone:
            engine.kill()
        assert gone
    # multiprocessing's resource tracker outlives the parent to unlink it
    assert litter(shared_memory_before) == frozenset()


def test_failure_in_mid_update_stops_the_engine(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs last: it stops the engine that the other tests share."""
    tensors = load_file(served.directories["other"] / "model.safetensors")
    save_file({n: t[:1].clone() for n, t in tensors.items()}, tmp_path / "misshapen.safetensors")
    monkeypatch.setattr(
        "actors.inference.vllm_policy.check_shapes", lambda shapes, *, expected, source: None
    )

    async def run() -> list[Completion | BaseException]:
        calls = [
            asyncio.ensure_future(served.policy.generate(prompt(s), seed=s, temperature=1.0))
            for s in range(256)
        ]  # 16 waves, so that most wait, however long it takes to fail
        await asyncio.sleep(0.05)
        path = tmp_path / "misshapen.safetensors"
        with pytest.raises(EngineLostError, match="Start a new policy"):
            await served.policy.load_weights(version=99, path=path, digest=digest_of(path))
        return list(await asyncio.gather(*calls, return_exceptions=True))

    # of those still running and of those in line: nobody waits for ever
    answers = list(served.run(run()))
    completions = [answer for answer in answers if isinstance(answer, Completion)]
    assert all(isinstance(answer, Completion | EngineLostError) for answer in answers)
    assert sum(c.finish_reason == "abort" for c in completions) > 8
    assert sum(isinstance(answer, EngineLostError) for answer in answers) > 32
    assert all(c.version_max == served.policy.version for c in completions)
    assert served.policy._llm is None


def test_received_weights_may_be_overwritten_only_when_the_update_is_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM reads a padded layer's tensor once more in the end."""
    from actors.inference import vllm_weight_loader

    order: list[str] = []
    staged: Future[vllm_weight_loader.Staged] = Future()
    staged.set_result(vllm_weight_loader.Staged(path=RECEIVED, digest="", tensors=()))
    engine = object.__new__(vllm_weight_loader.FileWeightTransferEngine)
    engine._staging, engine.model_config = staged, None  # type: ignore[assignment]
    engine._receiver = SimpleNamespace(release=lambda: order.append("released"))  # type: ignore[assignment]
    engine.model = SimpleNamespace(
        load_weights=lambda tensors: order.append("loaded"), modules=lambda: ()
    )  # type: ignore[assignment]
    monkeypatch.setattr(
        vllm_weight_loader,
        "finalize_layerwise_reload",
        lambda model, config: order.append("finished"),
    )
    engine.receive_weights(vllm_weight_loader.FileUpdateInfo(path=RECEIVED))
    engine.finish_weight_update()
    assert order == ["loaded", "finished", "released"]
