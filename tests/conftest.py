from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest
from misbehaving_proposers import FakeClock

# The same examples on every run, and no clock: compiling and a loaded machine take their time.
hypothesis.settings.register_profile("deterministic", derandomize=True, deadline=None)
hypothesis.settings.load_profile("deterministic")


@pytest.fixture
def clock() -> FakeClock:
    """Time that passes when the test says so."""
    return FakeClock()


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of 128 tokens, its tokenizer and a chat template."""
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'spec-plugins[transformers]'")
    transformers = pytest.importorskip(
        "transformers", reason="needs transformers: pip install 'spec-plugins[transformers]'"
    )
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("tiny_model")
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    letters = "abcdefghijklmnopqrstuvwxyz"
    text = [
        letters,
        letters.upper(),
        "0123456789 .,:;!?()'-+*/=\n",
        "the cat sat on the mat and that was that",
    ]
    special = ["<unk>", "</s>", "<|user|>", "<|assistant|>"]
    tokenizer.train_from_iterator(text * 3, trainers.BpeTrainer(vocab_size=128, special_tokens=special))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", pad_token="</s>"
    )
    fast.chat_template = (
        "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.1, bos_token_id=None,
        eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder
