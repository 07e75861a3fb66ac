"""The way in that patches nothing: ``--worker-cls spec_plugins.adapters.vllm.worker.Worker``.

A worker whose model runner is of a subclass, in place of wrapped methods of vLLM's own class. All else
is the same. It is for those who may not have classes patched; it must be told to vLLM by hand.
"""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

from spec_plugins.adapters.vllm import plugin
from spec_plugins.adapters.vllm.plugin import WRAPPERS, installed

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

__all__ = ["Worker"]


class Worker(PlatformWorker):  # type: ignore[misc]
    """vLLM's worker of this platform, whose model runner shows our drafter the requests."""

    def init_device(self) -> None:
        """Make the model runner, of a subclass."""
        plugin.patching = False
        super().init_device()
        runner = self.model_runner
        if plugin.drafter_of(runner) is not None:
            runner.__class__ = _subclass(type(runner))


def _subclass(base: type) -> type:
    found = installed()
    fits = (found.propose, found.update_states, found.aux_hidden_states)
    methods: dict[str, Any] = {}
    for (hook, wrapper), good in zip(WRAPPERS.items(), fits, strict=True):
        name = hook.path.rpartition(".")[2]
        if good:
            methods[name] = wrapper(getattr(base, name))
    return type(f"SpecPlugins{base.__name__}", (base,), methods)
