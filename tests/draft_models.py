"""Tiny language models and tokenizers in folders, for the tests of what drafts with a model."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

LETTERS = string.ascii_letters + string.digits + " .,:;!?"
TEXT = ["the cat sat on the mat and that was that", "a boat on the sea, the sea and the sand", LETTERS] * 3


def make_model(seed: int = 1, vocab: int = 96, **config: Any) -> Any:
    """A random Llama in float64, where equal means equal."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    settings = {
        "vocab_size": vocab, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.1,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**settings, **config})).to(torch.float64).eval()


def near(model: Any, noise: float = 0.05, seed: int = 9) -> Any:
    """A model that often says what another says, and often not."""
    import copy

    torch.manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1 + noise * torch.randn_like(weight))
    return other


def saved(folder: Path, model: Any, tokenizer: Any = None) -> str:
    """The folder, with these in it."""
    model.save_pretrained(folder)
    model.name_or_path = model.config._name_or_path = str(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return str(folder)


def letters(order: Sequence[str], special: Sequence[str] = ("<unk>", "</s>")) -> Any:
    """A tokenizer of single letters, in this order: each text has one encoding only."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    return _fast(
        Tokenizer(models.BPE({t: i for i, t in enumerate([*special, *_as_bytes(order)])}, [])),
        pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel(), special,
    )  # fmt: skip


def byte_level(size: int, special: Sequence[str] = ("<unk>", "</s>")) -> Any:
    """A byte-level BPE tokenizer as GPT-2's, of some words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=size, special_tokens=list(special), show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )  # fmt: skip
    return _fast(made, made.pre_tokenizer, decoders.ByteLevel(), special)


def metaspace(size: int, special: Sequence[str] = ("<unk>", "</s>", "<s>")) -> Any:
    """A BPE tokenizer as Llama 2's: a space is a letter, and one is added before every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=size, special_tokens=list(special), show_progress=False)
    )
    return _fast(made, made.pre_tokenizer, decoders.Metaspace(), special)


def _as_bytes(order: Sequence[str]) -> list[str]:
    return ["Ġ" if letter == " " else letter for letter in order]


def _fast(tokenizer: Any, pre_tokenizer: Any, decoder: Any, special: Sequence[str]) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoder
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>",
        bos_token="<s>" if "<s>" in special else None,
    )  # fmt: skip


def permuted(model: Any, order: Sequence[int]) -> Any:
    """The same model for a vocabulary whose token ``i`` is this one's ``order[i]``."""
    import copy

    other = copy.deepcopy(model)
    with torch.no_grad():
        for layer in (other.get_input_embeddings(), other.get_output_embeddings()):
            layer.weight.copy_(layer.weight[list(order)].clone())
    return other
