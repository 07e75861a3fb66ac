"""Small models for the embedded engine's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

VOCAB = 96


def make_model(seed: int = 1, vocab: int = VOCAB, **config: Any) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    # initializer_range: the context matters to the answer, and answers repeat themselves.
    settings = {
        "vocab_size": vocab, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.1,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**settings, **config})).to(torch.float64).eval()


@pytest.fixture(scope="session")
def random_model() -> Callable[..., Any]:
    """Makes a random Llama in float64, where equal outputs mean equal."""
    return make_model
