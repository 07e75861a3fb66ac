"""``model.generate(custom_generate=speculate(...))`` against ``model.generate``."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'spec-plugins[transformers]'")
pytest.importorskip("transformers", reason="needs transformers: pip install 'spec-plugins[transformers]'")

from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList  # noqa: E402

from spec_plugins import ConfigError, UnknownProposerError, UnsupportedError  # noqa: E402
from spec_plugins.adapters.transformers import speculate  # noqa: E402

SPEC = {"proposer": "ngram", "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def model(random_model: Any) -> Any:
    return random_model()


@pytest.fixture(scope="module")
def batch() -> dict[str, Any]:
    """Two prompts of different lengths, padded on the left."""
    ids = torch.tensor([[0, 0, 0, 7, 8, 9], [5, 6, 5, 6, 5, 6]])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def test_greedy(model: Any, batch: dict[str, Any]) -> None:
    for settings in (
        {"max_new_tokens": 40},
        {"max_length": 30},
        {"max_new_tokens": 40, "eos_token_id": [13, 60]},
    ):
        greedy = {"pad_token_id": 0, "do_sample": False, **settings}
        want = model.generate(**batch, **greedy)
        got = model.generate(**batch, **greedy, custom_generate=speculate(SPEC))
        assert got.tolist() == want.tolist()


def test_proposer_state_outlives_a_call(model: Any, batch: dict[str, Any]) -> None:
    decode = speculate("suffix")
    settings = {"pad_token_id": 0, "do_sample": False, "max_new_tokens": 30, "custom_generate": decode}
    first, second = (model.generate(**batch, **settings) for _ in range(2))
    assert first.tolist() == second.tolist()
    engine = decode.engines[model]
    assert engine.driver.statistics.accepted_tokens > 0
    assert not engine.running


def test_sampling_repeats_with_the_global_seed(model: Any, batch: dict[str, Any]) -> None:
    settings = {"do_sample": True, "temperature": 0.9, "top_p": 0.9, "max_new_tokens": 12, "pad_token_id": 0}
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(model.generate(**batch, **settings, custom_generate=speculate(SPEC)).tolist())
    assert outputs[0] == outputs[1]
    assert outputs[0] != outputs[2]


class Seen(StoppingCriteria):
    """Stops after a token that the answer holds early on."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        return input_ids[:, -1] == self.token


def test_stopping_criteria(model: Any) -> None:
    ids = torch.tensor([[5, 6, 5, 6, 5, 6]])
    whole = model.generate(ids, max_new_tokens=30, do_sample=False, pad_token_id=0)
    criteria = StoppingCriteriaList([Seen(int(whole[0, 10]))])
    settings = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0, "stopping_criteria": criteria}
    want = model.generate(ids, **settings)
    assert model.generate(ids, **settings, custom_generate=speculate(SPEC)).tolist() == want.tolist()
    assert want.shape[1] < whole.shape[1]


class Collector:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, tokens: Any) -> None:
        self.tokens += tokens.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_streamer_and_dict(model: Any) -> None:
    ids = torch.tensor([[5, 6, 5, 6]])
    streamer = Collector()
    got = model.generate(
        ids, max_new_tokens=20, do_sample=False, pad_token_id=0,
        return_dict_in_generate=True, custom_generate=speculate(SPEC, streamer=streamer),
    )  # fmt: skip
    assert streamer.tokens == got.sequences[0].tolist()
    assert streamer.ended


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"repetition_penalty": 1.3}, "RepetitionPenalty"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"logits_processor": LogitsProcessorList([lambda ids, scores: scores])}, "function"),
    ],
)
def test_refusals(model: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        model.generate(
            torch.tensor([[5, 6]]),
            max_new_tokens=4,
            pad_token_id=0,
            custom_generate=speculate(SPEC),
            **settings,
        )


def test_configuration_is_checked_at_once() -> None:
    with pytest.raises(UnknownProposerError):
        speculate({"proposer": "nothing"})
    with pytest.raises(ConfigError, match="num_speculative_tokens"):
        speculate("ngram", num_speculative_tokens=0)
