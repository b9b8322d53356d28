"""A checkpoint whose every bit is the same on every machine: weights from integer arithmetic, not from training.

Trained weights differ between CPUs, because kernels round differently, and from different weights other tokens are
sampled. Uniform doubles of a PCG64 generator are exact everywhere.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WIDTH = 0.35
"""Half the range of the weights: wide enough that distributions are far from uniform."""
END_OF_TURN_LOGIT = 2.0
"""Roughly what the end of a turn has above other tokens: a turn then ends after about ten tokens."""


def save_golden_model(directory: Path) -> Path:
    """Write model and tokenizer to `directory`, which is returned."""
    tokenizer = _tokenizer()
    _model(len(tokenizer), tokenizer.convert_tokens_to_ids(TURN_END)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _tokenizer() -> PreTrainedTokenizerFast:
    """One id per byte, then the control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (PAD, TURN_START, TURN_END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=PAD, chat_template=TEMPLATE, model_max_length=512
    )


def _model(vocab_size: int, end_of_turn: int) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end_of_turn,
        pad_token_id=end_of_turn,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    draw = np.random.Generator(np.random.PCG64(20261101))
    with torch.no_grad():
        for _, param in sorted(model.named_parameters()):
            if param.ndim > 1:  # norms stay 1
                values = draw.random(param.numel()) * 2 - 1
                param.copy_(torch.from_numpy((WIDTH * values).astype(np.float32)).view_as(param))
        # The first channel is a constant that only the end of a turn reads.
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[end_of_turn, 0] = END_OF_TURN_LOGIT
    return model
