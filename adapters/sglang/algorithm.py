"""SGLang's speculative algorithms that stand for proposers: registration, and checks of server arguments."""

from __future__ import annotations

import functools
from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from spec_plugins.adapters.sglang.settings import configuration
from spec_plugins.config import Config
from spec_plugins.errors import UnsupportedError
from spec_plugins.proposer import Need, Proposer

__all__ = ["MAX_RUNNING_REQUESTS", "Algorithm", "add"]

MAX_RUNNING_REQUESTS = 48
"""Where the user sets none: SGLang's own number for its n-gram algorithm."""
BRANCHES = 2
"""``--speculative-eagle-topk`` where drafts may branch: any number above 1 tells SGLang's attention backends,
and KV is reserved for its product with the steps."""
_VERIFY_TREES = ("flashinfer", "triton", "fa3", "torch_native", "intel_amx")
"""Attention backends that take a tree's mask; for others drafts are chains."""


class Algorithm(CustomSpecAlgo):  # type: ignore[misc]
    """To SGLang's scheduler it is an n-gram algorithm: drafts from the host, verified as trees."""

    def is_ngram(self) -> bool:
        """True: relays accepted tokens, and captures graphs for verifying trees."""
        return True

    def has_draft_kv(self) -> bool:
        """False: drafting writes nothing into the KV pool."""
        return False

    # CustomSpecAlgo of 0.5.23 lacks these three, which the scheduler calls.
    def carries_draft_hidden_states(self) -> bool:
        """False."""
        return False

    def need_topk(self) -> bool:
        """False."""
        return False

    create_future_map = SpeculativeAlgorithm.create_future_map

    def handle_server_args(self, server_args: Any) -> None:
        """Set what SGLang sets for its own n-gram algorithm, from the project's configuration."""
        config = self.configuration(server_args)
        proposer = config.create_proposer()
        nodes = config.draft_nodes(proposer)
        server_args.speculative_num_steps = config.num_speculative_tokens
        server_args.speculative_num_draft_tokens = nodes + 1
        server_args.speculative_eagle_topk = BRANCHES if _may_branch(server_args, proposer) else 1
        server_args.enable_mixed_chunk = False
        if server_args.max_running_requests is None:
            server_args.max_running_requests = MAX_RUNNING_REQUESTS

    def configuration(self, server_args: Any) -> Config:
        """The project's configuration; raises as :func:`configuration` does."""
        return configuration(
            self.proposer, server_args.speculative_num_steps, server_args.speculative_num_draft_tokens
        )

    proposer: str | None = None


def add(name: str, proposer: str | None, refusal: str = "") -> None:
    """Register an algorithm.

    Args:
        name: what ``--speculative-algorithm`` says.
        proposer: registered name; ``None``: the configuration's.
        refusal: why it cannot run; said when it is asked for.
    """
    kind = type(f"Algorithm[{name}]", (Algorithm,), {"proposer": proposer})
    register = SpeculativeAlgorithm.register(
        name,
        supports_overlap=True,
        validate_server_args=functools.partial(_validate, refusal),
        spec_class=kind,
    )
    register(_worker)


def _may_branch(server_args: Any, proposer: Proposer) -> bool:
    """Whether drafts are to be trees."""
    if Need.TREES not in proposer.needs | proposer.uses or server_args.attention_backend not in _VERIFY_TREES:
        return False
    # SGLang's paged attention goes wrong over branches, but for flashinfer; on a CPU nothing is paged.
    paged = server_args.page_size > 1 and server_args.attention_backend != "flashinfer"
    return not paged or server_args.device == "cpu"


def _worker(server_args: Any) -> type:
    from spec_plugins.adapters.sglang.worker import SpecWorker

    return SpecWorker


def _validate(refusal: str, server_args: Any) -> None:
    """Refuse what cannot work, before anything is loaded.

    Raises:
        UnsupportedError: says which argument, and what to set instead.
    """
    if refusal:
        raise UnsupportedError(refusal)
    name = server_args.speculative_algorithm
    for field, why in (
        ("pp_size", "drafts are verified on one pipeline stage only"),
        ("dcp_size", "drafts are not verified across context-parallel ranks"),
    ):
        if (getattr(server_args, field, 1) or 1) > 1:
            flag, value = f"--{field.replace('_', '-')}", getattr(server_args, field)
            raise UnsupportedError(f"{flag}: {value} cannot be used with {name}: {why}; set it to 1")
    for field, why in (
        ("enable_dp_attention", "SGLang's tree verifier has no attention data parallelism"),
        ("enable_two_batch_overlap", "a batch of trees cannot be split"),
        ("enable_multi_layer_eagle", "it belongs to EAGLE"),
        ("speculative_adaptive", "it belongs to EAGLE; the project's policy sets the length"),
    ):
        if getattr(server_args, field, False):
            flag = f"--{field.replace('_', '-')}"
            raise UnsupportedError(f"{flag} cannot be used with {name}: {why}; leave it out")
    if getattr(server_args, "disaggregation_mode", "null") != "null":
        raise UnsupportedError(
            f"--disaggregation-mode: {server_args.disaggregation_mode!r} cannot be used with {name}: the "
            "proposer's state is not sent between servers; leave it out"
        )
