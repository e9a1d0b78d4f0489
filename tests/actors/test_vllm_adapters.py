"""Serve LoRA adapters by a real engine: each request is answered by the version it began with."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from actors.concurrency import RequestGate
from actors.inference.vllm_adapters import SLOTS, Adapters, names_in_blocks
from actors.inference.vllm_policy import VLLMPolicy
from actors.inference.weight_load import WeightLoad
from actors.policy import Completion, Prompt
from configs import ActorsConfig, ModelConfig
from learner.model.lora import adapter_weights, add_adapters, write_adapter_config
from learner.publishing.publish import WeightsCopy
from store import (
    ADAPTER_FILE,
    WeightFileError,
    files_digest,
    tensor_shapes,
    weight_files,
    write_base,
)
from tests.support.served_model import VOCABULARY_SIZE, served_model

pytestmark = pytest.mark.engine

STOP_TOKEN = 7
# vLLM rounds it up to 8.
MODEL = ModelConfig(lora_rank=3, lora_alpha=6.0)


def make_base(path: Path, *, seed: int = 0) -> Path:
    served_model(seed=seed, eos_token_id=STOP_TOKEN).save_pretrained(path)
    return path


def adapted(base: Path, *, seed: int, model: ModelConfig = MODEL) -> PreTrainedModel:
    """Make a model with adapters as if trained; with seed 0 they are untouched."""
    causal_lm = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    torch.manual_seed(seed)
    add_adapters(causal_lm, rank=model.lora_rank, alpha=model.lora_alpha)
    if seed:
        with torch.no_grad():
            for name, tensor in adapter_weights(causal_lm):
                if ".lora_B." in name:
                    tensor.normal_(std=0.1)
    return causal_lm


def publish(causal_lm: PreTrainedModel, path: Path, *, base: Path) -> str:
    """Write a version as the learner does. Return its digest."""

    def write_others(directory: Path) -> None:
        write_adapter_config(causal_lm, directory)
        write_base(directory, digest=files_digest(weight_files(base)))

    copy = WeightsCopy()
    digest = copy.take(adapter_weights(causal_lm))
    copy.write_adapter(path, write_others=write_others)
    return digest


@dataclass(kw_only=True)
class Served:
    """An engine, and the model of each version that it has loaded."""

    loop: asyncio.AbstractEventLoop
    policy: VLLMPolicy
    base: Path
    models: dict[int, PreTrainedModel] = field(default_factory=dict)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, timeout=120))

    async def load(self, directory: Path, *, seed: int) -> WeightLoad:
        """Publish and load the next version. Its files are removed then, as an old version's."""
        version = max(self.models, default=0) + 1
        causal_lm, path = adapted(self.base, seed=seed), directory / f"v{version}"
        digest = publish(causal_lm, path, base=self.base)
        load = await self.policy.load_weights(version=version, path=path, digest=digest)
        assert (load.version, load.file_digest, load.pause_ms) == (version, digest, 0.0)
        shutil.rmtree(path)
        self.models[version] = causal_lm
        return load

    async def generate(self, *, seed: int) -> tuple[Prompt, Completion]:
        asked = prompt(seed)
        return asked, await self.policy.generate(asked, seed=seed, temperature=1.0)

    def check(self, asked: Prompt, answer: Completion, *, version: int) -> None:
        """Compare the answer's log-probabilities with a forward pass of that version."""
        assert (answer.version_min, answer.version_max) == (version, version)
        ids_BT = torch.tensor([asked.token_ids + answer.token_ids])
        with torch.no_grad():
            logits_TV = self.models[version](ids_BT).logits[0, len(asked.token_ids) - 1 : -1]
        expected_T = logits_TV.log_softmax(-1).gather(1, ids_BT[0, len(asked.token_ids) :, None])
        torch.testing.assert_close(
            torch.tensor(answer.logprobs), expected_T[:, 0], atol=1e-5, rtol=0
        )


def prompt(seed: int) -> Prompt:
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(8, VOCABULARY_SIZE, (100,), generator=generator).tolist()
    return Prompt(token_ids=tuple(token_ids), actions=None)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, engine_log: Path) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("adapters")
    base = make_base(root / "base")
    policy = VLLMPolicy(
        model_path=base,
        dtype="float32",
        lora=MODEL,
        actors=ActorsConfig(max_response_tokens=48, kv_cache_gib=0.125, cpu_cores="auto"),
        max_model_tokens=256,
        gate=RequestGate(32),
        stop_token_ids=[STOP_TOKEN],
        stop=(),
        tokenizer=None,
        log_path=engine_log,
        statistics=False,
    )
    loop = asyncio.new_event_loop()
    loop.run_until_complete(policy.start())
    served = Served(loop=loop, policy=policy, base=base)
    served.models[0] = adapted(base, seed=0)
    yield served
    served.run(policy.close())
    loop.close()


def held(served: Served) -> set[int]:
    """Return the ids of the adapters in the engine."""
    return set(served.run(served.policy._engine().list_loras()))


def test_an_answer_has_the_log_probabilities_of_its_version(served: Served, tmp_path: Path) -> None:
    """Compare the base model, an untouched adapter and two trained ones, with the same prompts.

    Their prefixes are in the engine's cache, under the version that computed them.
    """

    async def answers() -> list[tuple[Prompt, Completion]]:
        return list(await asyncio.gather(*(served.generate(seed=n) for n in range(8))))

    before = served.run(answers())
    for asked, answer in before:
        served.check(asked, answer, version=0)
    served.run(served.load(tmp_path, seed=0))
    for (asked, answer), (_, of_base) in zip(served.run(answers()), before, strict=True):
        served.check(asked, answer, version=1)
        assert answer.token_ids == of_base.token_ids
    for version in (2, 3):
        served.run(served.load(tmp_path, seed=version))
        changed = served.run(answers())
        for asked, answer in changed:
            served.check(asked, answer, version=version)
        assert [a.token_ids for _, a in changed] != [a.token_ids for _, a in before]


def test_requests_in_flight_end_with_the_version_they_began_with(
    served: Served, tmp_path: Path
) -> None:
    """Load more versions than one forward pass can have while requests of all of them run."""

    async def run() -> list[tuple[int, asyncio.Task[tuple[Prompt, Completion]]]]:
        begun = []
        for seed in range(SLOTS + 2):
            version = served.policy.version
            begun += [
                (version, asyncio.create_task(served.generate(seed=100 * seed + n)))
                for n in range(4)
            ]
            await asyncio.sleep(0)  # the requests begin
            await served.load(tmp_path, seed=10 + seed)
        await asyncio.gather(*(task for _, task in begun))
        return begun

    begun = served.run(run())
    assert len({version for version, _ in begun}) == SLOTS + 2
    for version, task in begun:
        served.check(*task.result(), version=version)


def test_adapters_without_requests_are_removed(served: Served, tmp_path: Path) -> None:
    for seed in (20, 21, 22):
        served.run(served.load(tmp_path, seed=seed))
    newest = served.policy.version
    # The id of a version is one more. The one before stays for the length of one load.
    assert held(served) == {newest + 1, newest}


def test_a_request_of_the_base_model_keeps_it(served: Served, tmp_path: Path) -> None:
    """Answer a request without an adapter in one batch with requests of adapters."""
    adapters = served.policy._adapters
    assert adapters is not None

    async def run() -> list[tuple[Prompt, Completion]]:
        newest, adapters._newest = adapters._newest, (0, None)
        of_base = [asyncio.create_task(served.generate(seed=n)) for n in range(4)]
        await asyncio.sleep(0)
        adapters._newest = newest
        others = [asyncio.create_task(served.generate(seed=n)) for n in range(4)]
        return list(await asyncio.gather(*of_base, *others))

    for seed in range(30, 30 + SLOTS):  # an adapter in every slot
        served.run(served.load(tmp_path, seed=seed))
    answers = served.run(run())
    for asked, answer in answers[:4]:
        served.check(asked, answer, version=0)
    for asked, answer in answers[4:]:
        served.check(asked, answer, version=served.policy.version)


def test_the_published_configuration_changes_nothing_that_is_served(
    served: Served, tmp_path: Path
) -> None:
    """Publish one that scales by alpha / sqrt(rank). The digest does not cover it."""
    causal_lm, version = adapted(served.base, seed=40), served.policy.version + 1
    digest = publish(causal_lm, tmp_path / "v", base=served.base)
    path = tmp_path / "v" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_rslora": True}))
    served.run(served.policy.load_weights(version=version, path=tmp_path / "v", digest=digest))
    served.models[version] = causal_lm
    served.check(*served.run(served.generate(seed=1)), version=version)


def cut(path: Path, base: Path) -> str:
    file = path / ADAPTER_FILE
    file.write_bytes(file.read_bytes()[:-1])
    return "is not a whole safetensors file"


def changed(path: Path, base: Path) -> str:
    file = path / ADAPTER_FILE
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return "published was .*: it changed on disk"


def of_another_rank(path: Path, base: Path) -> str:
    shutil.rmtree(path)
    model = ModelConfig(lora_rank=4, lora_alpha=6.0)
    publish(adapted(base, seed=1, model=model), path, base=base)
    return "has r=4, the run has model.lora_rank=3"


def of_another_base(path: Path, base: Path) -> str:
    write_base(path, digest="ab12")
    return "belongs to a base model with digest ab12"


def whole_weights(path: Path, base: Path) -> str:
    shutil.rmtree(path)
    shutil.copytree(base, path)
    return "it is no adapter"


@pytest.mark.parametrize("damage", [cut, changed, of_another_rank, of_another_base, whole_weights])
def test_a_wrong_adapter_is_refused_and_the_engine_goes_on(
    served: Served, tmp_path: Path, damage: Callable[[Path, Path], str]
) -> None:
    path, before = tmp_path / "wrong", served.policy.version
    digest = publish(adapted(served.base, seed=1), path, base=served.base)
    words = damage(path, served.base)
    with pytest.raises(WeightFileError, match=words) as refused:
        served.run(served.policy.load_weights(version=before + 1, path=path, digest=digest))
    assert str(path) in str(refused.value)
    assert served.policy.version == before
    asked, answer = served.run(served.generate(seed=3))
    served.check(asked, answer, version=before)


def test_a_layer_that_vllm_leaves_out_is_refused(served: Served, tmp_path: Path) -> None:
    """Publish an adapter with one more layer, which the base model's files pretend to have."""
    adapters = served.policy._adapters
    assert adapters is not None
    causal_lm, path = adapted(served.base, seed=1), tmp_path / "more"
    extra = {
        "base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": torch.zeros(3, 64),
        "base_model.model.model.layers.7.mlp.up_proj.lora_B.weight": torch.zeros(128, 3),
    }

    def write_others(directory: Path) -> None:
        causal_lm.peft_config["default"].target_modules.append("layers.7.mlp.up_proj")
        write_adapter_config(causal_lm, directory)
        write_base(directory, digest=files_digest(weight_files(served.base)))

    copy = WeightsCopy()
    digest = copy.take([*adapter_weights(causal_lm), *extra.items()])
    copy.write_adapter(path, write_others=write_others)
    version, before = served.policy.version, held(served)
    adapters._shapes = dict(adapters._shapes) | {"model.layers.7.mlp.up_proj.weight": [128, 64]}
    try:
        with pytest.raises(
            WeightFileError,
            match=r"no adapters for 1 layers.*model\.layers\.7\.mlp.*lora_serving=merged",
        ):
            served.run(served.policy.load_weights(version=version + 1, path=path, digest=digest))
    finally:
        adapters._shapes = tensor_shapes(served.base)
    assert held(served) == before


def test_vllm_is_asked_for_a_rank_that_it_allows_and_for_the_layers_of_the_blocks() -> None:
    shapes = {
        "model.embed_tokens.weight": [20, 6],
        "lm_head.weight": [20, 6],
        "model.layers.0.input_layernorm.weight": [6],
        "model.layers.0.self_attn.q_proj.weight": [6, 6],
        "model.layers.11.mlp.up_proj.weight": [8, 6],
    }
    assert names_in_blocks(shapes) == ["q_proj", "up_proj"]
    for rank, allowed in ((1, 1), (3, 8), (16, 16), (17, 32), (300, 320), (512, 512)):
        adapters = Adapters(base=Path(), shapes=shapes, model=ModelConfig(lora_rank=rank))
        assert adapters.arguments()["max_lora_rank"] == allowed
