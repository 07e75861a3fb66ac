"""Hidden states of a target model that runs in SGLang: those of its last layer, and those of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

from spec_plugins.adapters.sglang.hooks import LAST_STATES, LAYERS
from spec_plugins.errors import UnsupportedError
from spec_plugins.hooks import fits
from spec_plugins.proposer import Need, Proposer

if TYPE_CHECKING:
    import torch

__all__ = ["LayerStates"]

_KINDS = frozenset({Need.HIDDEN_STATES, Need.AUX_HIDDEN_STATES})


class LayerStates:
    """Which hidden states a proposer takes, and where a forward pass leaves them.

    SGLang gives those of chosen layers in place of the last one's, and keeps the last one's beside them
    where its logits processor is told to.
    """

    def __init__(self, model_runner: Any, proposer: Proposer) -> None:
        """Have the model keep what is wanted; before its first forward pass, on every rank.

        Args:
            model_runner: the target's ``ModelRunner``, with its model loaded.
            proposer: what will draft.

        Raises:
            UnsupportedError: the model has no such layers, or keeps others than it was asked for.
        """
        wanted, model = (proposer.needs | proposer.uses) & _KINDS, model_runner.model
        self.layers: tuple[int, ...] = ()
        """The layers that the model keeps the input of, in the proposer's order."""
        if Need.AUX_HIDDEN_STATES in wanted and _shows_layers(model):
            count = int(model_runner.model_config.num_hidden_layers)
            self.layers = tuple(proposer.aux_layers(count))
            if self.layers:
                _keep_layers(model, self.layers, count)
        self.wanted = wanted if self.layers else wanted - {Need.AUX_HIDDEN_STATES}
        """Kinds that are given and taken."""

    @property
    def provides(self) -> frozenset[Need]:
        """Kinds that are given."""
        return _KINDS if self.layers else _KINDS - {Need.AUX_HIDDEN_STATES}

    def kept_by(self, target_worker: Any) -> Any:
        """The target's worker, such that its forward passes keep them."""
        return _Keeps(target_worker) if self.wanted else target_worker

    def of(self, output: Any) -> Mapping[Need, torch.Tensor]:
        """Of a forward pass's ``LogitsProcessorOutput``, for each kind: ``[tokens, hidden_size]``, or for
        layers ``[tokens, layers * hidden_size]``."""
        if not self.layers:
            found = {Need.HIDDEN_STATES: output.hidden_states}
        else:
            found = {
                Need.HIDDEN_STATES: output.last_hidden_states,
                Need.AUX_HIDDEN_STATES: self._in_order(output.hidden_states),
            }
        return {need: found[need] for need in self.wanted if found[need] is not None}

    def _in_order(self, states: torch.Tensor | None) -> torch.Tensor | None:
        """SGLang puts the layers side by side in ascending order, each once."""
        ascending = sorted(set(self.layers))
        if states is None or list(self.layers) == ascending:
            return states
        order = [ascending.index(layer) for layer in self.layers]
        return states.reshape(len(states), len(ascending), -1)[:, order].flatten(1)


class _Keeps:
    """A target worker whose forward passes keep hidden states of all tokens."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self._worker.forward_batch_generation(
            batch, *args, **{**kwargs, "capture_hidden_mode": CaptureHiddenMode.FULL}
        )


def _shows_layers(model: Any) -> bool:
    return hasattr(model, "set_eagle3_layers_to_capture") and fits(LAYERS) and fits(LAST_STATES)


def _keep_layers(model: Any, layers: tuple[int, ...], count: int) -> None:
    """Have the model keep the inputs of layers, and the last layer's output too."""
    wanted = sorted(set(layers))
    if wanted[0] < 0 or wanted[-1] >= count:
        raise UnsupportedError(
            f"aux_layers: {layers} are not all in this target, which has layers 0 to {count - 1}; use a "
            "proposer that was made for it"
        )
    # SGLang's number is of the layer whose output it is, one less; with some models it depends on the number.
    for ids in ([layer - 1 for layer in wanted], wanted):
        model.set_eagle3_layers_to_capture(ids)
        kept = [sorted(k) for m in model.modules() if (k := getattr(m, "layers_to_capture", None))]
        if kept and all(k == wanted for k in kept):
            break
    else:
        raise UnsupportedError(
            f"aux_layers: SGLang's {type(model).__name__} keeps {kept} where {wanted} were asked for; use a "
            "proposer that takes the last layer's hidden states"
        )
    for module in model.modules():
        if hasattr(module, "keep_last_hidden_states"):
            module.keep_last_hidden_states = True
