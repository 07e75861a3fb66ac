"""How every SGLang engine of these tests is started, and the environment variables that it needs on a CPU."""

from __future__ import annotations

import importlib.util
import os
import re
import stat
from pathlib import Path
from typing import Any, NoReturn

ON_CPU = importlib.util.find_spec("torchvision_operators") is not None
"""Whether the environment has the stand-ins."""
CONTEXT_LENGTH = 256
_TAIL = 1 << 16
_ERROR = re.compile(r"\b(\w+(Error|Exception)\b.*:|exit code -?[1-9])")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
cache = Path(os.environ.get("SPEC_PLUGINS_CACHE", "~/.cache/spec-plugins")).expanduser()
os.environ.setdefault("SGLANG_CACHE_DIR", str(cache / "sglang"))
# More threads do not make so small a model faster, and on a loaded machine they wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if ON_CPU:
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

ENGINE: dict[str, Any] = {
    "dtype": "float32", "context_length": CONTEXT_LENGTH, "max_total_tokens": 8192,
    "max_running_requests": 8, "random_seed": 0, "skip_server_warmup": True, "disable_cuda_graph": True,
    "disable_overlap_schedule": True, "sleep_on_idle": True,
}  # fmt: skip
"""Arguments of ``sglang.Engine``, which are flags of its server too. Awake, one would keep a core busy."""
if ON_CPU:
    ENGINE |= {"device": "cpu", "attention_backend": "torch_native"}


def report_failed_process(*_: object) -> NoReturn:
    """What a signal from one of SGLang's processes does; SGLang's own answer is to kill this one."""
    raise RuntimeError(
        f"one of SGLang's processes failed: {_last_error() or 'see what it printed to stderr'}"
    )


def _last_error() -> str:
    """The last line with an error in what pytest captured, so that its summary names the cause."""
    about = os.fstat(2)
    if not stat.S_ISREG(about.st_mode):
        return ""
    try:
        printed = os.pread(2, _TAIL, max(0, about.st_size - _TAIL)).decode(errors="replace")
    except OSError:
        return ""  # not open for reading
    lines = [line.strip() for line in printed.splitlines() if _ERROR.search(line)]
    return lines[-1] if lines else ""
