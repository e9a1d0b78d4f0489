"""A tiny Qwen2.5-VL with random weights, made without a hub, and rooms to look at."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from learner.model.tiny_model import train_tokenizer

VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<assistant>{{ message['content'] }}<eos>{% else "
    "%}<user>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in "
    "message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ "
    "part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HIDDEN = 64
# So large that another image, or another place of a token, is another log-probability in its second
# decimal.
WEIGHTS_STD = 0.1


def vision_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    tokenizer = train_tokenizer(texts, vocabulary_size=320)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD]}
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def vision_config(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLConfig:
    image_pad, video_pad, start, end = tokenizer.convert_tokens_to_ids(
        [IMAGE_PAD, VIDEO_PAD, VISION_START, VISION_END]
    )
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [4, 6, 6],
            },
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 2,  # one with windows, one without
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_heads": 2,
            "out_hidden_size": HIDDEN,
            "patch_size": 14,
            "window_size": 56,  # two by two tokens: a room has several
            "fullatt_block_indexes": [1],
        },
        image_token_id=image_pad,
        video_token_id=video_pad,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def make_vision_model(dest: Path, texts: Iterable[str], *, seed: int) -> PreTrainedTokenizerFast:
    """Writes a complete model directory, float32, with an image processor; returns its
    tokenizer.
    """
    tokenizer = vision_tokenizer(texts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(vision_config(tokenizer))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" not in name and "ln_q" not in name:
                    parameter.normal_(std=WEIGHTS_STD)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    model.save_pretrained(dest)
    tokenizer.save_pretrained(dest)
    Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=64 * 28 * 28).save_pretrained(dest)
    return tokenizer
