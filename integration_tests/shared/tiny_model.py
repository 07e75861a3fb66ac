"""A model that is small enough for every engine to start with it in each test."""

from __future__ import annotations

from pathlib import Path

CONTEXT = 1024
VOCABULARY = 128


def save_tiny_model(folder: Path) -> Path:
    """Save a random Llama of 128 tokens whose greedy text repeats itself now and then, with a tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    printable = [chr(c) for c in range(32, 127)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()[:0] or printable,
        show_progress=False,
    )
    tokenizer.train_from_iterator(["".join(printable), "\n"], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>")
    fast.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    fast.save_pretrained(folder)
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, max_position_embeddings=CONTEXT,
        initializer_range=0.12, tie_word_embeddings=False, bos_token_id=None, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def prompts_of_tiny_model() -> list[list[int]]:
    """Token ids of a dozen prompts: short and long, some with a beginning in common."""
    shared = [(7 * i) % 120 + 3 for i in range(40)]
    return [
        *([5 + i, 9, 14, 9, 14 + i] for i in range(4)),
        *([*shared, 20 + i, 21, 22] for i in range(4)),
        *([(i * j) % 120 + 3 for j in range(60 + 10 * i)] for i in range(1, 5)),
    ]
