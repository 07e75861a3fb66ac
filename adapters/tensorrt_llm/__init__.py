"""The TensorRT-LLM adapter: token-only proposers on its PyTorch backend, as a user-provided drafter.

    from spec_plugins.adapters.tensorrt_llm import speculative_config

    llm = LLM(MODEL, speculative_config=speculative_config("suffix", MODEL))

Verified against a stand-in of the engine's executor only (``docs/tensorrt_llm.md``).
"""

from __future__ import annotations

from spec_plugins.adapters.tensorrt_llm.speculation import speculative_config

__all__ = ["speculative_config"]
