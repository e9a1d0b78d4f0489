from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from configs import (
    LearnerConfig,
    LossConfig,
    ModelConfig,
)
from learner.data.updates import split_updates
from learner.distributed import deepspeed_setup
from learner.distributed.deepspeed_setup import initialize
from learner.distributed.optimizer_state import MASTER, read_state, trainable
from learner.training.engine import Engine, scheduled, with_proximal
from learner.training.step_metrics import mean_of_updates
from tests.support.engine_samples import (
    CUT,
    WHOLE,
    assert_first_step_same,
    copied,
    cut,
    far_rows,
    gradient,
    make_base,
    random_rows,
)
from tests.support.teacher_server import plain_logprobs

MODEL = ModelConfig()
LEARNER = LearnerConfig(learning_rate=1e-2, grad_clip=0.1)
MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture
def make_engine(base: Path) -> Iterator[MakeEngine]:
    engines: list[Engine] = []

    def make(
        *,
        model: ModelConfig = MODEL,
        learner: LearnerConfig = LEARNER,
        path: Path = base,
        temperature: float = 1.0,
        **loss: Any,
    ) -> Engine:
        engine = Engine(
            model_path=path,
            model=model,
            learner=learner,
            loss=LossConfig(**loss),
            temperature=temperature,
            seed=0,
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("budget", [WHOLE, CUT])
def test_logprobs_are_those_of_the_plain_model_whatever_the_packing(
    make_engine: MakeEngine, base: Path, temperature: float, budget: int
) -> None:
    rows = random_rows()
    expected = plain_logprobs(base, rows, temperature=temperature)
    engine = make_engine(temperature=temperature)
    batches = cut(rows, budget)
    scored: dict[int, list[float]] = {row: [] for row in expected}
    for batch, logprobs_N in zip(batches, engine.score(batches), strict=True):
        for row, logprob in zip(batch.rows_N.tolist(), logprobs_N.tolist(), strict=True):
            scored[row].append(logprob)
    for row, logprobs in expected.items():
        assert scored[row] == pytest.approx(logprobs, abs=1e-5)


def test_the_loss_and_the_weights_do_not_depend_on_the_cut(make_engine: MakeEngine) -> None:
    rows = random_rows()
    stats, weights = [], []
    for budget in (WHOLE, CUT, 1):
        engine = make_engine(entropy_coef=0.01)
        stats.append(engine.update(cut(rows, budget)))
        weights.append(copied(engine))
    for other in stats[1:]:
        for field in ("loss", "grad_norm", "entropy"):
            assert getattr(other, field) == pytest.approx(
                getattr(stats[0], field), rel=1e-5, abs=1e-6
            ), field
        assert other.tokens == pytest.approx(stats[0].tokens, rel=1e-5, abs=1e-6)
        assert (other.n_tokens, other.n_rows) == (stats[0].n_tokens, stats[0].n_rows)
    for other_weights in weights[1:]:
        assert_first_step_same(
            other_weights, weights[0], gradient(engine), learning_rate=LEARNER.learning_rate
        )


@pytest.mark.parametrize(
    "loss",
    [
        {"corrections": ["m2po", "token_tis"], "numbers": {"m2po": {"limit": 0.2}}},
        {
            "corrections": ["sequence_tis", "geometric_mask"],
            "numbers": {"geometric_mask": {"low": 0.7, "high": 1.4}},
        },
        {"corrections": ["m2po"], "proximal": "interpolated"},
        {"policy": "gspo", "numbers": {"gspo": {"clip_low": 0.1, "clip_high": 0.1}}},
        {"policy": "sapo", "corrections": ["k3_mask"], "numbers": {"k3_mask": {"limit": 0.3}}},
        {
            "policy": "dppo_tv",
            "aggregation": "sequence_mean_token_sum_norm",
            "numbers": {"sequence_mean_token_sum_norm": {"norm_tokens": 5.0}},
        },
    ],
    ids=lambda loss: "+".join([loss.get("policy", "ppo_clip"), *loss.get("corrections", [])]),
)
def test_no_loss_or_correction_depends_on_the_cut(
    make_engine: MakeEngine, loss: dict[str, Any]
) -> None:
    rows = far_rows()
    stats = [make_engine(**loss).update(cut(rows, budget)) for budget in (WHOLE, CUT, 1)]
    if loss.get("corrections"):
        assert 0.0 < stats[0].tokens["masked_fraction"] < 1.0, "the mask has something to do"
    for other in stats[1:]:
        assert other.loss == pytest.approx(stats[0].loss, rel=1e-5, abs=1e-6)
        assert other.grad_norm == pytest.approx(stats[0].grad_norm, rel=1e-5)
        assert other.tokens == pytest.approx(stats[0].tokens, rel=1e-5, abs=1e-6)


def test_m2po_ranks_the_whole_update_and_not_a_micro_batch(make_engine: MakeEngine) -> None:
    """A micro-batch of its own for each row would keep a token of each at least; over the update
    whole rows go.
    """
    rows = far_rows()
    engine = make_engine(corrections=["m2po"], numbers={"m2po": {"limit": 0.01}})
    (whole,) = cut(rows, WHOLE)
    (logprobs_N,) = engine.score([whole])
    squares = sorted((logprobs_N - whole.behaviour_logprobs_N).square().tolist())
    n_kept = sum(sum(squares[:k]) / k < 0.01 for k in range(1, len(squares) + 1))
    stats = engine.update(cut(rows, 1))
    assert stats.tokens["masked_fraction"] == pytest.approx(1 - n_kept / len(squares))
    assert n_kept < rows.num_rows


def test_the_recomputed_proximal_policy_is_the_one_before_the_first_update(
    make_engine: MakeEngine,
) -> None:
    """At the first update pi = pi_p, so the clip cannot act and the loss is -mean(rho A); at the
    second it has moved.
    """
    rows = far_rows()
    engine = make_engine(proximal="recomputed", corrections=[])
    batches = cut(rows, CUT)
    batches = with_proximal(batches, engine.score(batches))
    ratio_N = torch.cat(
        [torch.exp(b.proximal_logprobs_N - b.behaviour_logprobs_N) for b in batches]
    )
    advantages_N = torch.cat([batch.advantages_N for batch in batches])
    first = engine.update(batches)
    assert first.loss == pytest.approx(-(ratio_N * advantages_N).mean().item(), rel=1e-5)
    assert first.tokens["clip_fraction"] == 0.0
    for _ in range(5):
        later = engine.update(batches)
    assert later.tokens["clip_fraction"] > 0.0
    with pytest.raises(ValueError, match="no proximal_logprobs_N"):
        engine.update(cut(rows, CUT))


def test_an_update_is_scored_once_for_its_proximal_policy_and_its_sample_size(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(
        proximal="recomputed", learner=dataclasses.replace(LEARNER, ess_scaled=True)
    )
    updates = [
        cut(part, CUT) for part in split_updates(far_rows(), updates=2, rows_per_update=0, seed=0)
    ]
    score, scored = engine.score, []
    monkeypatch.setattr(
        engine, "score", lambda batches: scored.append(len(batches)) or score(batches)
    )
    stats = engine.train(updates)
    first, second = map(len, updates)
    assert scored == [first, second, second], (
        "the second once more, as the first has moved the policy"
    )
    for update in stats:
        assert update.learning_rate == pytest.approx(
            LEARNER.learning_rate * update.tokens["ess"], rel=1e-5
        )


def test_a_learner_step_has_one_proximal_policy_for_all_its_updates(
    make_engine: MakeEngine,
) -> None:
    """Each update with a proximal policy of its own would have r = 1 throughout, and a clip that
    never acts.
    """
    updates = [
        cut(part, CUT) for part in split_updates(far_rows(), updates=3, rows_per_update=0, seed=0)
    ]
    stats = make_engine(
        proximal="recomputed", learner=dataclasses.replace(LEARNER, learning_rate=0.05)
    ).train(updates)
    assert [s.n_rows for s in stats] == [4, 4, 4]
    assert stats[0].tokens["clip_fraction"] == 0.0
    assert stats[2].tokens["clip_fraction"] > 0.0
    (whole,) = make_engine().train([cut(far_rows(), CUT)])
    assert {"mismatch_kl_on_policy", "mismatch_kl_stale_2"} < whole.tokens.keys()
    metrics = mean_of_updates([whole, *stats])
    assert metrics["loss/mismatch_kl_on_policy"] == whole.tokens["mismatch_kl_on_policy"], (
        "later ones have moved the policy"
    )
    assert metrics["loss/n_rows"] == (12 + 4 + 4 + 4) / 4
    assert metrics["loss/ess"] == pytest.approx(sum(s.tokens["ess"] for s in [whole, *stats]) / 4)


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_an_update_with_fewer_rows_weighs_so_much_less(
    make_engine: MakeEngine, zero_stage: int
) -> None:
    """12 rows where an update has 48: a quarter of the gradient of 12 rows where an update has
    12.
    """
    learner = dataclasses.replace(LEARNER, zero_stage=zero_stage)
    batches = cut(far_rows(), CUT)
    full = make_engine(learner=dataclasses.replace(learner, rows_per_update=12)).update(batches)
    last = make_engine(learner=dataclasses.replace(learner, rows_per_update=48)).update(batches)
    assert last.grad_norm == pytest.approx(full.grad_norm / 4, rel=1e-5)
    assert last.loss == pytest.approx(full.loss)


def test_the_gradient_of_many_micro_batches_is_that_of_one_loss_in_plain_torch(
    make_engine: MakeEngine, base: Path
) -> None:
    """Against transformers' own model, a row at a time, all logits at once, and a loss written out
    here.
    """
    rows = random_rows().to_pydict()
    reference = AutoModelForCausalLM.from_pretrained(base)
    surrogates, entropies = [], []
    for prompt, response, behaviour, advantage in zip(
        rows["prompt_ids"],
        rows["response_ids"],
        rows["response_logprobs"],
        rows["advantage"],
        strict=True,
    ):
        logits_TV = reference(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        logprobs_TV = torch.log_softmax(logits_TV, -1)
        ratio_T = torch.exp(
            logprobs_TV.gather(1, torch.tensor(response)[:, None])[:, 0] - torch.tensor(behaviour)
        )
        assert ratio_T.max() < 2.0, (
            "no ratio reaches the cap or the dual clip, which are left out here"
        )
        surrogates.append(torch.min(ratio_T * advantage, ratio_T.clamp(0.8, 1.2) * advantage))
        entropies.append(-(logprobs_TV.exp() * logprobs_TV).sum(-1))
    loss = -torch.cat(surrogates).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), LEARNER.grad_clip)

    engine = make_engine()
    stats = engine.update(cut(random_rows(), CUT))
    assert stats.loss == pytest.approx(loss.item(), abs=1e-6)
    assert stats.grad_norm == pytest.approx(float(norm), rel=1e-5)
    assert stats.entropy == pytest.approx(torch.cat(entropies).mean().item(), rel=1e-6)
    found, expected = gradient(engine), dict(reference.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        assert float((found[name] - parameter.grad).norm() / parameter.grad.norm()) < 1e-5, name

    optimizer = torch.optim.AdamW(
        reference.parameters(), lr=LEARNER.learning_rate, weight_decay=LEARNER.weight_decay
    )
    optimizer.step()
    stepped = {name: parameter.detach() for name, parameter in expected.items()}
    assert_first_step_same(copied(engine), stepped, found, learning_rate=LEARNER.learning_rate)


def test_zero_stages_give_the_same_weights(make_engine: MakeEngine) -> None:
    weights, norms = [], []
    for stage in (0, 1, 2, 3):
        engine = make_engine(learner=dataclasses.replace(LEARNER, zero_stage=stage))
        for seed in range(3):
            stats = engine.update(cut(random_rows(seed=seed), CUT))
        weights.append(copied(engine))
        norms.append(stats.grad_norm)
        engine.close()
    assert norms[1:] == pytest.approx([norms[0]] * 3, rel=1e-5)
    for other in weights[1:]:
        for name, tensor in other.items():
            # three steps of 0.01; a gradient near Adam's epsilon moves its weight by what rounding
            # made of it
            assert torch.allclose(tensor, weights[0][name], atol=1e-4), name


def test_the_same_seed_and_data_give_bit_identical_weights(make_engine: MakeEngine) -> None:
    ends = []
    for _ in range(2):
        engine = make_engine(kl_coef=0.1)
        for seed in range(3):
            engine.update(cut(random_rows(seed=seed), CUT))
        ends.append(copied(engine))
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


@pytest.mark.parametrize(("lora_rank", "zero_stage"), [(0, 0), (4, 0), (4, 3)])
def test_kl_is_to_the_base_model_and_holds_the_policy_there(
    make_engine: MakeEngine, lora_rank: int, zero_stage: int
) -> None:
    batches = cut(random_rows(), WHOLE)
    ends = {}
    for kl_coef in (1e-9, 10.0):
        learner = dataclasses.replace(LEARNER, zero_stage=zero_stage)
        engine = make_engine(
            kl_coef=kl_coef, model=ModelConfig(lora_rank=lora_rank), learner=learner
        )
        assert (engine.reference is None) == (lora_rank > 0), (
            "without its adapters the policy is the base model"
        )
        assert engine.update(batches).kl == pytest.approx(0.0, abs=1e-9)
        for _ in range(5):
            stats = engine.update(batches)
        ends[kl_coef] = stats.kl
        engine.close()
    assert 0.0 < ends[10.0] < 0.5 * ends[1e-9]
    assert make_engine().reference is None


def test_cloning_teaches_the_recorded_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine(policy="behaviour_cloning")
    batches = cut(random_rows(), WHOLE)
    losses = [engine.update(batches).loss for _ in range(15)]
    assert losses[0] == pytest.approx(math.log(280), abs=0.5)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_distillation_draws_the_policy_to_its_teacher(
    make_engine: MakeEngine, tmp_path: Path, lora_rank: int
) -> None:
    """The loss on the policy's own tokens is the mean of log pi - log q; no advantage is read."""
    teacher = make_base(tmp_path / "teacher", seed=1)
    rows = random_rows(24)
    engine = make_engine(
        policy="distillation", teacher=str(teacher), model=ModelConfig(lora_rank=lora_rank)
    )
    (batch,) = cut(rows, WHOLE)
    judged = plain_logprobs(teacher, rows, temperature=1.0)
    (own_N,) = engine.score([batch])
    fresh = dataclasses.replace(
        batch, behaviour_logprobs_N=own_N, advantages_N=torch.full_like(own_N, 99.0)
    )
    teacher_N = torch.tensor([value for row in range(24) for value in judged[row]])
    mine_N = torch.cat([own_N[batch.rows_N == row] for row in range(24)])
    first = engine.update([fresh])
    assert first.loss == pytest.approx((mine_N - teacher_N).mean().item(), abs=1e-5)
    for _ in range(10):
        engine.update([fresh])
    (after_N,) = engine.score([batch])
    toward_N = torch.sign(teacher_N - mine_N)
    moved_N = torch.cat([(after_N - own_N)[batch.rows_N == row] for row in range(24)])
    assert (moved_N * toward_N).mean() > 0, "likelier where the teacher says so"
    assert engine.teacher is not None and make_engine().teacher is None


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("broken", ["advantage", "weight"])
def test_an_update_that_is_not_finite_is_skipped_and_the_next_one_is_not(
    make_engine: MakeEngine, zero_stage: int, broken: str
) -> None:
    engine = make_engine(
        learner=dataclasses.replace(LEARNER, zero_stage=zero_stage, warmup_updates=2)
    )
    good = cut(random_rows(), CUT)
    before = copied(engine)
    bad = list(good)
    if broken == "advantage":  # in the first of several micro-batches: the later ones are fine
        bad[0] = dataclasses.replace(
            bad[0], advantages_N=torch.full_like(bad[0].advantages_N, math.inf)
        )
        stats = engine.update(bad)
        assert stats.loss == math.inf
        assert stats.bad_rows == tuple(sorted(set(bad[0].rows_N.tolist())))
    else:  # the loss is finite, its gradient is not
        parameter = next(engine.policy.parameters())
        hook = parameter.register_hook(lambda gradient: gradient * math.nan)
        stats = engine.update(good)
        hook.remove()
        assert math.isfinite(stats.loss)
        assert stats.bad_rows == ()
    assert stats.skipped
    assert stats.grad_norm == math.inf
    assert all(torch.equal(tensor, before[name]) for name, tensor in copied(engine).items())
    after = engine.update(good)
    assert not after.skipped
    assert after.learning_rate == stats.learning_rate, (
        "a skipped update does not count in the warm-up"
    )
    fresh = make_engine(
        learner=dataclasses.replace(LEARNER, zero_stage=zero_stage, warmup_updates=2)
    )
    assert fresh.update(good).grad_norm == pytest.approx(after.grad_norm, rel=1e-6), (
        "nothing of the bad gradient stayed"
    )


def test_warm_up_counts_optimizer_updates(make_engine: MakeEngine) -> None:
    warming = LearnerConfig(learning_rate=1.0, warmup_updates=4)
    assert [scheduled(warming, n_updates=n) for n in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert scheduled(LearnerConfig(learning_rate=3.0), n_updates=0) == 3.0
    falling = LearnerConfig(learning_rate=1.0, schedule="linear", steps=2, updates_per_step=2)
    assert [scheduled(falling, n_updates=n) for n in range(5)] == pytest.approx(
        [1.0, 0.7, 0.4, 0.1, 0.1]
    )
    # as if it had been so from the start: it jumps from 0.1 to its own line
    longer = dataclasses.replace(falling, steps=4)
    assert scheduled(longer, n_updates=4) == pytest.approx(1.0 - 0.9 * 4 / 7)
    both = dataclasses.replace(falling, warmup_updates=2)
    assert [scheduled(both, n_updates=n) / scheduled(falling, n_updates=n) for n in range(4)] == [
        *(0.5, 1.0, 1.0, 1.0)
    ]
    engine = make_engine(learner=dataclasses.replace(LEARNER, warmup_updates=2))
    batches = cut(random_rows(), CUT)
    assert [engine.update(batches).learning_rate for _ in range(3)] == [0.005, 0.01, 0.01]


def test_an_untied_output_layer_is_trained_and_published(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    config = Qwen2Config(
        vocab_size=280, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, tie_word_embeddings=False,
        attention_dropout=0.5,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    rows = random_rows()
    engine = make_engine(path=tmp_path)
    (batch,) = cut(rows, WHOLE)
    (logprobs_N,) = engine.score([batch])
    expected = plain_logprobs(tmp_path, rows, temperature=1.0)
    order = dict.fromkeys(batch.rows_N.tolist())
    assert logprobs_N.tolist() == pytest.approx(
        [x for row in order for x in expected[row]], abs=1e-5
    )
    before = copied(engine)
    engine.update([batch])
    assert "lm_head.weight" in before
    assert not any(torch.equal(tensor, before[name]) for name, tensor in copied(engine).items())


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_bf16_keeps_fp32_masters(
    base: Path, zero_stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The final norm starts at 1, where bf16 rounds to 1 whatever moves less than 2 ** -9 = 0.002.
    # An update moves 2.5e-4.
    # checkpointed layers gather their weights twice
    monkeypatch.setattr(deepspeed_setup, "WHOLE_ELEMENTS", 0)
    engine = Engine(
        model_path=base,
        model=ModelConfig(dtype="bfloat16", gradient_checkpointing=True),
        learner=LearnerConfig(learning_rate=2.5e-4, zero_stage=zero_stage),
        loss=LossConfig(policy="behaviour_cloning"),
        temperature=1.0,
        seed=0,
    )
    assert {tensor.dtype for tensor in copied(engine).values()} == {torch.bfloat16}
    batches = cut(random_rows(), WHOLE)
    engine.update(batches)
    norm = copied(engine)["model.norm.weight"]
    assert torch.equal(norm, torch.ones_like(norm))
    for _ in range(16):
        engine.update(batches)
    assert not torch.equal(copied(engine)["model.norm.weight"], norm)
    engine.close()


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_adapters_of_a_bf16_base_are_trained_in_float32(
    make_engine: MakeEngine, zero_stage: int
) -> None:
    model = ModelConfig(dtype="bfloat16", lora_rank=4, gradient_checkpointing=True)
    engine = make_engine(
        model=model,
        learner=dataclasses.replace(LEARNER, zero_stage=zero_stage),
        policy="behaviour_cloning",
    )
    parameters = dict(engine.policy.causal_lm.named_parameters())
    assert {parameter.dtype for name, parameter in parameters.items() if ".lora_" in name} == {
        torch.float32
    }
    assert {parameter.dtype for name, parameter in parameters.items() if ".lora_" not in name} == {
        torch.bfloat16
    }
    batches, before = cut(random_rows(), WHOLE), copied(engine)
    losses = [engine.update(batches).loss for _ in range(4)]
    assert losses[-1] < 0.9 * losses[0]
    after = copied(engine)
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]) == ("_proj.weight" not in name), (
            "what is not adapted stays, bit for bit"
        )
    found = read_state(engine.deepspeed, trainable(engine.policy.causal_lm), kind=MASTER)
    masters = {name: tensor.clone() for name, tensor in found}
    assert all((tensor != tensor.bfloat16()).any() for tensor in masters.values()), (
        "nothing rounds them on the way"
    )


def test_settings_that_cannot_train_are_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"set learner\.zero_stage=1"):
        initialize(torch.nn.Linear(1, 1), dtype="bfloat16", learner=LEARNER)
    with pytest.raises(ValueError, match=r"learner\.offload=true with learner\.zero_stage=0"):
        initialize(
            torch.nn.Linear(1, 1),
            dtype="float32",
            learner=dataclasses.replace(LEARNER, offload=True),
        )
    with pytest.raises(FileNotFoundError, match=r"no config.json"):
        make_engine(path=tmp_path)
    with pytest.raises(ValueError, match="'ppo' is none of"):
        make_engine(policy="ppo")
    with pytest.raises(ValueError, match="at least one response token"):
        make_engine().update([])
