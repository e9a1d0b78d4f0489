"""Make a base policy without a download: a tokenizer for game text, and a small random Qwen2.

    tokenizer = train_tokenizer(texts, vocabulary_size=1024)
    make_tiny_model(run_dir / "base", tokenizer=tokenizer, config=config.model.tiny, seed=0)

transformers and vLLM load the directory like any other. Behaviour cloning teaches it the game.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from configs import HEAD_SIZE, TinyModelConfig
from learner.files.atomic_directory import atomic_directory

PAD, EOS, USER, ASSISTANT = "<pad>", "<eos>", "<user>", "<assistant>"
CONTROL_TOKENS = (PAD, EOS, USER, ASSISTANT)  # left out when an answer is decoded
# One token each, and kept in decoded text, because the parser reads them.
ANSWER_TOKENS = ("<think>", "</think>", "<action>", "</action>")
N_BYTES = 256  # byte-level BPE knows each byte, so any text can be encoded and decoded without loss

# Tools are shown as `add(a, b)`, which a tiny model reads sooner than their JSON. Calls have the
# form of Hermes and Qwen2.5.
CHAT_TEMPLATE = (
    "{% if tools %}<user>{% for tool in tools %}{{ tool.function.name }}("
    "{{ (tool.function.parameters or {}).get('properties', {}).keys() | join(', ') }}) "
    "{% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<assistant>{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "</tool_call>{% endfor %}<eos>"
    "{% else %}<user>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

# Times the hidden size h. A gated layer has three matrices: 6 h^2 beside attention's 4 h^2.
FEED_FORWARD_FACTOR = 2
MAX_POSITIONS = 4096
# Of UTF-8 that a tokenizer is made of. Its trainer keeps each different word: at worst 500 MiB.
MAX_BYTES = 4_000_000
PIECE_CHARACTERS = 100_000
# Hidden sizes of one or two hundred train faster from a wider start than the 0.02 made for
# thousands: 128 ** -0.5 / 2.
INITIALIZER_RANGE = 0.04


def train_tokenizer(texts: Iterable[str], *, vocabulary_size: int) -> PreTrainedTokenizerFast:
    """Train byte-level BPE on `texts`, with control and answer tokens.

    decode(encode(text)) == text for any text. The vocabulary is smaller than asked if `texts` have
    too few pairs to merge; see `len(tokenizer)`. What follows MAX_BYTES is not looked at.
    """
    added = len(CONTROL_TOKENS) + len(ANSWER_TOKENS)
    if vocabulary_size < N_BYTES + added:
        raise ValueError(
            f"vocabulary_size={vocabulary_size} is too small: {N_BYTES} bytes and {added} added "
            f"tokens need at least {N_BYTES + added}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size - len(ANSWER_TOKENS),
        special_tokens=[AddedToken(token, special=True) for token in CONTROL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first_bytes(texts), trainer)
    # Added after the training, whose own list would make them control tokens that decoding leaves
    # out.
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in ANSWER_TOKENS]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,  # it would drop the space before a full stop
    )


def _first_bytes(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts in pieces, up to the one that goes beyond MAX_BYTES."""
    left = MAX_BYTES
    for text in texts:
        for begin in range(0, len(text), PIECE_CHARACTERS):
            piece = text[begin : begin + PIECE_CHARACTERS]
            yield piece
            left -= len(piece.encode(errors="surrogatepass"))
            if left <= 0:
                return


def make_tiny_model(
    dest: Path, *, tokenizer: PreTrainedTokenizerFast, config: TinyModelConfig, seed: int
) -> None:
    """Write a model directory: Qwen2 with random float32 weights and tied embeddings."""
    n_heads = config.hidden_size // HEAD_SIZE
    model_config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=FEED_FORWARD_FACTOR * config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=n_heads,
        num_key_value_heads=n_heads,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(model_config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    disable_progress_bar()  # one file of a few MB
    with atomic_directory(dest) as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
