"""What the adapter relies on inside TensorRT-LLM's PyTorch backend: read in its source, never run here."""

from __future__ import annotations

from spec_plugins.hooks import Hook

__all__ = [
    "BASE_DRAFTER", "BASE_RESOURCE_MANAGER", "BROADCAST", "HOOKS", "LAUNCH_SERVER", "RANK", "USER_PROVIDED",
    "WORLD_SIZE",
]  # fmt: skip

_SEEN = "1.0 to 1.3, in their source"
_DRAFTER = "tensorrt_llm._torch.speculative.drafter:Drafter"
_MANAGER = "tensorrt_llm._torch.pyexecutor.resource_manager:BaseResourceManager"
_REQUEST = "tensorrt_llm._torch.pyexecutor.llm_request:LlmRequest"

BASE_DRAFTER = Hook(_DRAFTER, None, _SEEN, "is the class that drafters derive from")
BASE_RESOURCE_MANAGER = Hook(_MANAGER, None, _SEEN, "is the class of what is told that a request is over")
USER_PROVIDED = Hook(
    "tensorrt_llm.llmapi:UserProvidedDecodingConfig", None, _SEEN, "takes a drafter and a resource manager"
)
LAUNCH_SERVER = Hook(
    "tensorrt_llm.commands.serve:launch_server",
    ("host", "port", "llm_args"),
    _SEEN,
    "serves a model whose arguments hold an object",
)
WORLD_SIZE = Hook(
    "tensorrt_llm._utils:mpi_world_size",
    (),
    _SEEN,
    "says whether there are other ranks, which take over the first one's drafts",
)
RANK = Hook("tensorrt_llm._utils:mpi_rank", (), _SEEN, "says which of the ranks drafts")
BROADCAST = Hook(
    "tensorrt_llm._utils:mpi_broadcast", ("obj", "root"), _SEEN, "hands the first rank's drafts to the others"
)

HOOKS = (
    BASE_DRAFTER,
    Hook(
        f"{_DRAFTER}.__init__",
        ("max_concurrency",),
        "1.0: alone; 1.1, 1.2: with max_draft_len, max_total_draft_tokens, draft_len_schedule; 1.3: those, "
        "and a class attribute _needs_padding_kv_extension",
        "is called with what it takes",
    ),
    Hook(
        f"{_DRAFTER}.prepare_draft_tokens",
        ("scheduled_requests", "resource_manager"),
        _SEEN,
        "asks for the drafts of a step",
    ),
    BASE_RESOURCE_MANAGER,
    Hook(f"{_MANAGER}.free_resources", ("request",), _SEEN, "says that a request is over, or was preempted"),
    Hook(
        f"{_MANAGER}.prepare_resources",
        ("scheduled_batch",),
        _SEEN,
        "is called before a step, and shows that the other will be",
    ),
    Hook(f"{_REQUEST}.get_tokens", None, _SEEN, "gives a new request's tokens"),
    Hook(f"{_REQUEST}.get_token", None, _SEEN, "gives one token, so that only new ones are copied"),
    Hook(f"{_REQUEST}.get_num_tokens", None, _SEEN, "says how many tokens a request has"),
    USER_PROVIDED,
    LAUNCH_SERVER,
    WORLD_SIZE,
    RANK,
    BROADCAST,
)
