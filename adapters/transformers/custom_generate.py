"""Speculation inside ``model.generate``, through transformers' own ``custom_generate`` hook."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from spec_plugins.adapters.transformers.engine import Engine
from spec_plugins.adapters.transformers.requests import Request, SamplingParams
from spec_plugins.config import Config, load_config
from spec_plugins.errors import UnsupportedError

__all__ = ["speculate"]

# Logits processors that say again what the generation configuration says.
_WARPERS = {"TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper"}


def speculate(
    spec: Config | Mapping[str, Any] | str | Path = "suffix", *, streamer: Any = None, **overrides: Any
) -> Callable[..., Any]:
    """A decoding method for ``model.generate``::

        model.generate(**inputs, custom_generate=speculate("suffix", num_speculative_tokens=8))

    Greedy and sampled decoding, batches with left padding, stopping criteria and
    ``return_dict_in_generate``; output is what ``generate`` gives without it. Keep the returned function:
    what a proposer learns from one call serves the next.

    Args:
        spec: whatever :func:`~spec_plugins.config.load_config` reads.
        streamer: a transformers streamer; ``generate`` does not pass its own on to this hook.
        overrides: fields of the configuration.

    Raises:
        ConfigError, UnknownProposerError, UnavailableError: ``spec`` cannot be used.
        UnsupportedError: from ``generate``, for beams, logits processors beyond temperature, top-k,
            top-p and min-p, or requested scores.
    """
    config = load_config(spec, **overrides)
    engines: weakref.WeakKeyDictionary[Any, Engine] = weakref.WeakKeyDictionary()

    def decode(
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any = (),
        stopping_criteria: Any = (),
        generation_config: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        _refuse(generation_config, logits_processor, model_kwargs)
        engine = engines.get(model)
        if engine is None:
            engine = engines[model] = Engine(model, None, config)
        params = _params(generation_config)
        mask = model_kwargs.get("attention_mask")
        requests = []
        for i, row in enumerate(input_ids):
            tokens = row if mask is None else row[mask[i].bool()]
            sampled = params.model_copy(
                update={
                    "max_new_tokens": max(1, generation_config.max_length - len(row)),
                    # From the global generator, so that torch.manual_seed makes a call repeatable.
                    "seed": int(torch.randint(2**62, ())) if params.temperature > 0 else None,
                }
            )
            request = engine.request(i, tokens.tolist(), sampled)
            request.stop_when = _criteria(stopping_criteria, row)
            requests.append(request)
        if streamer is not None:
            streamer.put(input_ids.cpu())
        with engine.accept(requests):
            _run(engine, requests, streamer)
        pad = generation_config.pad_token_id if generation_config.pad_token_id is not None else 0
        width = max(len(r.output) for r in requests)
        answers = torch.full((len(requests), width), pad, dtype=input_ids.dtype, device=input_ids.device)
        for i, request in enumerate(requests):
            answers[i, : len(request.output)] = torch.tensor(request.output)
        sequences = torch.cat([input_ids, answers], dim=-1)
        if generation_config.return_dict_in_generate:
            from transformers.generation.utils import GenerateDecoderOnlyOutput

            return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
        return sequences

    decode.engines = engines  # type: ignore[attr-defined]
    return decode


def _run(engine: Engine, requests: list[Request], streamer: Any) -> None:
    sent = 0
    while engine.running or engine.waiting:
        engine.step()
        if streamer is not None:
            streamer.put(torch.tensor(requests[0].output[sent:]))
            sent = len(requests[0].output)
    if streamer is not None:
        streamer.end()


def _params(generation_config: Any) -> SamplingParams:
    eos = generation_config.eos_token_id
    stop = () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)
    if not generation_config.do_sample:
        return SamplingParams(stop_token_ids=stop, ignore_eos=True)
    return SamplingParams(
        temperature=generation_config.temperature if generation_config.temperature is not None else 1.0,
        top_k=generation_config.top_k or 0,
        top_p=generation_config.top_p if generation_config.top_p is not None else 1.0,
        min_p=generation_config.min_p or 0.0,
        stop_token_ids=stop,
        ignore_eos=True,
    )


def _criteria(stopping_criteria: Any, row: torch.Tensor) -> Callable[[list[int]], bool] | None:
    """The caller's own stopping criteria; length and end tokens are the engine's already."""
    own = [c for c in stopping_criteria if type(c).__name__ not in ("MaxLengthCriteria", "EosTokenCriteria")]
    if not own:
        return None

    def stop(output: list[int]) -> bool:
        ids = torch.cat([row, torch.tensor(output, dtype=row.dtype, device=row.device)])[None]
        return any(bool(torch.as_tensor(c(ids, None)).all()) for c in own)

    return stop


def _refuse(generation_config: Any, logits_processor: Any, model_kwargs: Mapping[str, Any]) -> None:
    if (generation_config.num_beams or 1) > 1:
        raise UnsupportedError(
            f"num_beams {generation_config.num_beams}: speculation decodes one beam; set it to 1"
        )
    other = [type(p).__name__ for p in logits_processor if type(p).__name__ not in _WARPERS]
    if other:
        raise UnsupportedError(
            f"logits_processor {', '.join(other)}: only temperature, top_k, top_p and min_p are supported "
            "here; leave out the settings that add it"
        )
    wanted = [
        name
        for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
        if getattr(generation_config, name, False)
    ]
    if wanted:
        raise UnsupportedError(f"{', '.join(wanted)}: not kept under speculation; leave it out")
    if model_kwargs.get("inputs_embeds") is not None:
        raise UnsupportedError("inputs_embeds: a proposer needs token ids; give input_ids")
