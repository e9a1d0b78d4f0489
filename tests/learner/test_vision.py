"""The learner's forward pass over images: transformers' own numbers, whatever is packed with
what.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoImageProcessor, Qwen2_5_VLForConditionalGeneration

from configs import LearnerConfig
from learner.data.micro_batch import MicroBatch, micro_batches
from learner.model.policy_model import PolicyModel, load_policy
from learner.model.vision import checkpoint_names, image_positions, names_to_publish
from store.records import IMAGES_TYPE
from tests.support.vision_samples import IMAGE_PAD

SIZES = [(56, 84), (28, 56), (84, 84), None, (56, 84)]  # height and width of each row's image


@pytest.fixture(scope="module")
def policy(vision_base: Path) -> PolicyModel:
    return load_policy(vision_base, dtype="float32", gradient_checkpointing=False, temperature=1.0)


def image_token(policy: PolicyModel) -> int:
    return int(policy.causal_lm.config.image_token_id)


def make_rows(policy: PolicyModel) -> pa.Table:
    rng = np.random.default_rng(0)
    prompts, images = [], []
    for size in SIZES:
        pixels = None if size is None else rng.integers(0, 256, (*size, 3), dtype=np.uint8)
        images.append(None if pixels is None else [(*size, pixels.tobytes())])
        n_tokens = 0 if size is None else size[0] // 28 * (size[1] // 28)
        prompts.append([5, 6, *[image_token(policy)] * n_tokens, 7, 8])
    n = len(SIZES)
    return pa.table(
        {
            "traj_uid": pa.array([b"0" * 16] * n, pa.binary(16)),
            "step_index": pa.array(range(n), pa.int32()),
            "prompt_ids": pa.array(prompts, pa.list_(pa.int32())),
            "response_ids": pa.array([[9, 10, 11]] * n, pa.list_(pa.int32())),
            "response_logprobs": pa.array([[-1.0] * 3] * n, pa.list_(pa.float32())),
            "advantage": pa.array(rng.normal(size=n)),
            "staleness": pa.array([0] * n),
            "images": pa.array(images, IMAGES_TYPE),
        }
    )


def by_row(policy: PolicyModel, batches: list[MicroBatch]) -> dict[int, torch.Tensor]:
    found = {}
    for batch in batches:
        logprobs_N, _ = policy(batch)
        found |= {row: logprobs_N[batch.rows_N == row] for row in batch.rows_N.unique().tolist()}
    return found


def test_an_image_has_positions_in_two_directions_and_text_goes_on_behind_them() -> None:
    is_pad = np.array([0, 0, 1, 1, 1, 1, 1, 1, 0], dtype=bool)
    positions, is_image = image_positions(is_pad, [(1, 2, 3)])
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]
    assert (is_image == is_pad).all()
    assert (
        image_positions(np.array([True, False, True]), [(1, 1, 1), (1, 1, 1)])[0].tolist()
        == [[0, 1, 2]] * 3
    )
    assert image_positions(np.zeros(3, dtype=bool), [])[0].tolist() == [[0, 1, 2]] * 3
    for too_large in ((1, 2, 4), (1, 3, 3)):
        with pytest.raises(ValueError, match=f"an image of {np.prod(too_large)} tokens"):
            image_positions(is_pad, [too_large])


def test_an_image_token_that_was_sampled_is_a_word() -> None:
    positions, is_image = image_positions(np.array([1, 1, 0, 1, 1], dtype=bool), [(1, 1, 2)])
    assert is_image.tolist() == [True, True, False, False, False]
    assert positions.tolist() == [[0, 0, 2, 3, 4], [0, 0, 2, 3, 4], [0, 1, 2, 3, 4]]


def test_log_probabilities_are_those_of_transformers(
    vision_base: Path, policy: PolicyModel
) -> None:
    rows = make_rows(policy)
    (batch,) = micro_batches(rows, micro_batch_tokens=1000, ranks=1)
    found = by_row(policy, [batch])
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(vision_base).eval()
    processor = AutoImageProcessor.from_pretrained(vision_base, backend="pil")
    for row, columns in enumerate(rows.to_pylist()):
        ids = torch.tensor([columns["prompt_ids"] + columns["response_ids"]])
        seen = {}
        if columns["images"]:
            (image,) = columns["images"]
            pixels = np.frombuffer(image["pixels"], np.uint8).reshape(
                image["height"], image["width"], 3
            )
            # Without the kind of each token transformers takes an image for a line of text, without
            # a word.
            seen = {
                **processor(images=[pixels], return_tensors="pt"),
                "mm_token_type_ids": (ids == image_token(policy)).int(),
            }
        with torch.no_grad():
            logits_LV = model(input_ids=ids, **seen).logits[0]
        expected = logits_LV.log_softmax(-1)[-4:-1].gather(1, ids[0, -3:, None])[:, 0]
        torch.testing.assert_close(found[row].detach(), expected, rtol=0, atol=2e-5)
    # Rows 0 and 4 have the same tokens, and other images.
    assert (found[0] - found[4]).abs().max() > 1e-2


@pytest.mark.parametrize("micro_batch_tokens", [1, 20])
def test_the_gradient_does_not_depend_on_how_rows_are_packed(
    policy: PolicyModel, micro_batch_tokens: int
) -> None:
    def gradients(tokens: int) -> tuple[int, dict[str, torch.Tensor]]:
        policy.zero_grad()
        batches = micro_batches(make_rows(policy), micro_batch_tokens=tokens, ranks=1)
        for batch in batches:
            logprobs_N, entropy_N = policy(batch)
            (logprobs_N @ batch.advantages_N + 0.1 * entropy_N.sum()).backward()
        found = {
            name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None
        }
        return len(batches), found

    n_one, together = gradients(1000)
    n_cut, apart = gradients(micro_batch_tokens)
    assert n_one == 1 < n_cut
    assert together.keys() == apart.keys() == dict(policy.named_parameters()).keys()
    for name, gradient in together.items():
        torch.testing.assert_close(apart[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
    assert any(
        "visual.blocks.0" in name and gradient.abs().max() > 1e-4
        for name, gradient in together.items()
    )


def test_a_pass_without_an_image_reaches_every_parameter(policy: PolicyModel) -> None:
    rows = make_rows(policy)
    of_text = [
        batch
        for batch in micro_batches(rows, micro_batch_tokens=1, ranks=8)
        if not any(batch.images_S)
    ]
    assert {batch.n_rows for batch in of_text} == {0, 1}
    for batch in of_text:
        policy.zero_grad()
        logprobs_N, _ = policy(batch)
        logprobs_N.sum().backward()
        tower = [p.grad for p in policy.causal_lm.base_model.visual.parameters()]
        assert tower and all(grad is not None and not grad.any() for grad in tower)


def test_one_sequence_of_a_micro_batch_keeps_its_image(policy: PolicyModel) -> None:
    rows = make_rows(policy).slice(0, 3)
    (batch,) = micro_batches(rows, micro_batch_tokens=1000, ranks=1)
    short = batch.only_sequence(int(batch.bounds_Sp1.diff().argmin()))
    assert short.rows_N.tolist() == [1, 1, 1] and short.images_S[0][0].shape == (28, 56, 3)
    torch.testing.assert_close(
        by_row(policy, [short])[1], by_row(policy, [batch])[1], rtol=0, atol=1e-5
    )


def test_steps_with_images_are_never_merged(policy: PolicyModel) -> None:
    prompts = [[5, image_token(policy), 6], [5, image_token(policy), 6, 9, 10, 11, 7]]
    rows = (
        make_rows(policy)
        .slice(0, 2)
        .set_column(2, "prompt_ids", pa.array(prompts, pa.list_(pa.int32())))
    )
    images = pa.array([[(28, 28, bytes(28 * 28 * 3))]] * 2, IMAGES_TYPE)
    apart = rows.set_column(rows.column_names.index("images"), "images", images)
    (batch,) = micro_batches(apart, micro_batch_tokens=1000, ranks=1)
    assert batch.bounds_Sp1.numel() == 3
    (merged,) = micro_batches(rows.drop_columns(["images"]), micro_batch_tokens=1000, ranks=1)
    assert merged.bounds_Sp1.numel() == 2


def test_weights_have_the_names_of_the_base_models_files(
    vision_base: Path, policy: PolicyModel
) -> None:
    names = checkpoint_names(vision_base, policy.causal_lm.state_dict())
    assert names["model.visual.merger.ln_q.weight"] == "visual.merger.ln_q.weight"
    assert names["model.language_model.norm.weight"] == "model.norm.weight"
    assert checkpoint_names(vision_base / "nowhere", ["model.visual.x"]) == {
        "model.visual.x": "model.visual.x"
    }
    assert IMAGE_PAD in (vision_base / "tokenizer.json").read_text()


def test_zero_3_is_refused_for_what_would_hang(vision_base: Path, policy: PolicyModel) -> None:
    with pytest.raises(ValueError, match="zero_stage=3 with a vision model"):
        names_to_publish(vision_base, policy=policy, learner=LearnerConfig(zero_stage=3))
    assert names_to_publish(vision_base, policy=policy, learner=LearnerConfig(zero_stage=2))[
        "model.visual.merger.ln_q.weight"
    ].startswith("visual.")
