"""Test images in prompts with a real processor and chat template, without vLLM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from actors.policy import Completion
from actors.prompting.images import ImageForm, load_image_form
from actors.prompting.prompt import PromptForm
from actors.prompting.template import Turn
from actors.rollout.step_records import SampledAnswer, anchor_of, step_of
from configs import PromptConfig
from envs import Observation
from tests.support.vision_samples import IMAGE_PAD, VISION_END, VISION_START

IMAGE = np.arange(56 * 84 * 3, dtype=np.uint8).reshape(56, 84, 3)  # 2 x 3 tokens
SEEN = Observation(text="# P X O #", objective="push", actions=("up",), images=(IMAGE,))
CONFIG = PromptConfig(template="sokoban_image", history_length=0, max_prompt_tokens=2000)


@pytest.fixture(scope="module")
def images(vision_base: Path) -> ImageForm:
    form = load_image_form(vision_base)
    assert form is not None
    return form


def form_of(vision_base: Path, images: ImageForm | None, **changes: object) -> PromptForm:
    return PromptForm(
        AutoTokenizer.from_pretrained(vision_base), replace(CONFIG, **changes), images=images
    )


def test_the_image_comes_before_the_words_as_its_tokens(
    vision_base: Path, images: ImageForm
) -> None:
    form = form_of(vision_base, images)
    prompt = form.prompt(SEEN, [])
    text = form.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
    assert text.startswith(f"<user>{VISION_START}{IMAGE_PAD * 6}{VISION_END}You are an expert")
    assert "# P X O #" not in text, "the room is shown and not told"
    assert prompt.images == (IMAGE,)
    assert images.spans(prompt.token_ids, prompt.images) == [(2, 6)]
    pixel_values_PF, grid_I3 = images.pixel_values(prompt.images)
    assert (pixel_values_PF.shape, grid_I3.tolist()) == ((4 * 6, 3 * 2 * 14 * 14), [[1, 4, 6]])
    words = form.prompt(replace(SEEN, images=()), [])
    assert len(words.token_ids) == len(prompt.token_ids) - 8 and words.images == ()


def test_an_image_is_resized_by_the_processors_own_rule(images: ImageForm) -> None:
    # one token; to the nearest; enlarged; to at most 64 tokens
    sizes = [(28, 28), (30, 60), (10, 10), (28 * 20, 28 * 20)]
    made = [np.zeros((*size, 3), np.uint8) for size in sizes]
    assert [images.n_tokens(image) for image in made] == [1, 2, 1, 64]
    _, grid_I3 = images.pixel_values(made)
    assert [int(grid.prod()) // 4 for grid in grid_I3] == [1, 2, 1, 64]


def test_several_images_have_their_places_one_after_the_other(images: ImageForm) -> None:
    pad = images.image_token_id
    one, two = np.zeros((28, 28, 3), np.uint8), np.zeros((28, 56, 3), np.uint8)
    expanded = images.expanded((5, pad, 6, pad, 7), (two, one))
    assert expanded == (5, pad, pad, 6, pad, 7)
    assert images.spans(expanded, (two, one)) == [(1, 2), (4, 1)]
    assert images.spans(images.expanded((pad, pad), (one, two)), (one, two)) == [(0, 1), (1, 2)]
    with pytest.raises(ValueError, match="makes 0 image tokens of 1 images"):
        images.expanded((5, 6), (one,))


def test_a_text_cannot_spell_the_image_token(vision_base: Path, images: ImageForm) -> None:
    """Neither at once, nor by what is left when it was taken out of the middle."""
    form = form_of(vision_base, images)
    word = form.tokenizer.decode([images.image_token_id], skip_special_tokens=False)
    half = len(word) // 2
    for text in (word, word[:half] + word + word[half:]):
        shown = form.prompt(replace(SEEN, text=f"a {text} b"), [])
        assert images.spans(shown.token_ids, shown.images) == [(2, 6)]
        words = form.prompt(replace(SEEN, text=f"a {text} b", images=()), [])
        assert images.image_token_id not in words.token_ids
    chat = form_of(vision_base, images, style="chat")
    seen = replace(SEEN, text=word, images=())
    first = chat.prompt(seen, [])
    turn = Turn(observation=word, action="up", prompt=first, response_ids=(5,))
    assert images.image_token_id not in chat.prompt(seen, [turn]).token_ids


def test_an_image_that_has_no_place_in_a_prompt_is_refused(
    vision_base: Path, images: ImageForm
) -> None:
    with pytest.raises(ValueError, match="does not see"):
        form_of(vision_base, None).prompt(SEEN, [])
    with pytest.raises(ValueError, match="place for one"):
        form_of(vision_base, images).prompt(replace(SEEN, images=(IMAGE, IMAGE)), [])
    with pytest.raises(ValueError, match="aspect ratio"):
        form_of(vision_base, images).prompt(
            replace(SEEN, images=(np.zeros((28, 28 * 300, 3), np.uint8),)), []
        )
    with pytest.raises(ValueError, match="max_prompt_tokens=20 has no room"):
        form_of(vision_base, images, max_prompt_tokens=20).prompt(SEEN, [])


def test_style_chat_is_refused(vision_base: Path, images: ImageForm) -> None:
    with pytest.raises(ValueError, match="use 'window' with images"):
        form_of(vision_base, images, style="chat").prompt(SEEN, [])


def test_a_model_of_text_has_no_way_with_images(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    assert load_image_form(tmp_path) is None


def test_a_step_has_the_pixels_that_were_shown(vision_base: Path, images: ImageForm) -> None:
    completion = Completion(
        token_ids=(1,), logprobs=(-1.0,), finish_reason="stop", version_min=0, version_max=0
    )
    prompt = form_of(vision_base, images).prompt(SEEN, [])
    step = step_of(
        SampledAnswer(prompt=prompt, completion=completion, t_start_us=0, gen_us=0),
        step_index=0,
        observation=SEEN,
        anchor=anchor_of(SEEN),
        action="up",
        is_valid=True,
    )
    (image,) = step.images
    assert (image.height, image.width, image.pixels) == (56, 84, IMAGE.tobytes())
    assert step.anchor_text == SEEN.text
