"""Which layers a model is asked to keep, and what is done where it cannot."""

from __future__ import annotations

from types import SimpleNamespace as Some
from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs SGLang: make environment-sglang")

import torch
from toys import Head

from spec_plugins.adapters.sglang import layer_states
from spec_plugins.adapters.sglang.layer_states import LayerStates
from spec_plugins.errors import UnsupportedError
from spec_plugins.hooks import Hook
from spec_plugins.proposer import Need

BOTH = {Need.HIDDEN_STATES, Need.AUX_HIDDEN_STATES}


class Model(torch.nn.Module):
    """Keeps layers as SGLang's models do."""

    def __init__(self, added: int = 1) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.logits_processor = torch.nn.Module()
        self.logits_processor.keep_last_hidden_states = False
        self.added = added

    def set_eagle3_layers_to_capture(self, layer_ids: list[int]) -> None:
        self.model.layers_to_capture = [i + self.added for i in layer_ids]


def states(model: Any, layers: int = 3) -> LayerStates:
    return LayerStates(Some(model=model, model_config=Some(num_hidden_layers=layers)), Head())


@pytest.mark.parametrize("added", [0, 1])
def test_layers_have_the_models_own_numbers_and_the_proposers_order(added: int) -> None:
    model = Model(added)
    found = states(model)
    assert model.model.layers_to_capture == [0, 2]
    assert model.logits_processor.keep_last_hidden_states
    assert found.provides == found.wanted == BOTH
    output = Some(last_hidden_states=torch.ones(2, 2), hidden_states=torch.tensor([[0, 0, 2, 2.0]] * 2))
    shown = found.of(output)
    assert shown[Need.HIDDEN_STATES].tolist() == [[1, 1]] * 2
    assert shown[Need.AUX_HIDDEN_STATES].tolist() == [[2, 2, 0, 0]] * 2


def test_layers_that_a_model_lacks_or_does_not_keep_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"aux_layers: \(2, 0\) are not all in this target"):
        states(Model(), layers=2)
    with pytest.raises(UnsupportedError, match=r"Model keeps \[\[2, 4\]\] where \[0, 2\] were asked for"):
        states(Model(added=2))


def test_without_the_hook_or_the_method_the_last_layer_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Module()
    assert states(model).provides == {Need.HIDDEN_STATES}
    changed = Hook(layer_states.LAYERS.path, ("another",), "", "")
    monkeypatch.setattr(layer_states, "LAYERS", changed)
    found = states(Model())
    assert found.provides == found.wanted == {Need.HIDDEN_STATES}
    last = torch.ones(2, 2)
    assert found.of(Some(hidden_states=last))[Need.HIDDEN_STATES] is last
