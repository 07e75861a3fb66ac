"""Every layout of trained heads: read whichever it is, write one that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_plugins.checkpoints.checks import check_fits, check_head
from spec_plugins.checkpoints.eagle import EagleLayout, SglangEagleLayout, SpeculatorsLayout, VllmEagleLayout
from spec_plugins.checkpoints.files import Stored, check_free, read_folder, write_folder
from spec_plugins.checkpoints.head import EagleConfig, Head, MedusaConfig
from spec_plugins.checkpoints.layout import Layout, Wanted
from spec_plugins.checkpoints.medusa import MedusaLayout, VllmMedusaLayout
from spec_plugins.config import validated
from spec_plugins.errors import ConfigError, UnsupportedError
from spec_plugins.registry import suggest
from spec_plugins.support import ENGINES, explain

__all__ = [
    "LAYOUTS",
    "NAMES",
    "Found",
    "check_layout",
    "find_head",
    "is_draft_model",
    "read_head",
    "write_head",
]

_OWN = "spec_plugins_head"


class OwnLayout(Layout):
    """This project's: the head as it is in memory, so that nothing is ever lost."""

    name = "spec-plugins"
    methods = ("medusa", "eagle", "eagle3")

    def recognises(self, stored: Stored) -> bool:
        return _OWN in stored.config

    def read(self, stored: Stored) -> Head:
        fields = stored.config[_OWN]
        if not isinstance(fields, dict):
            raise ConfigError(f"config.json: {_OWN} must be an object, and is {fields!r}")
        if fields.get("method") == "medusa":
            return Head(validated(MedusaConfig, fields, _OWN), stored.tensors)
        return Head(validated(EagleConfig, fields, _OWN), stored.tensors)

    def lost(self, head: Head, wanted: Wanted) -> list[str]:
        return []

    def config(self, head: Head, wanted: Wanted) -> dict[str, Any]:
        return {_OWN: head.config.model_dump(mode="json")}


LAYOUTS: tuple[Layout, ...] = (
    OwnLayout(),
    SpeculatorsLayout(),
    VllmMedusaLayout(),
    MedusaLayout(),
    VllmEagleLayout(),
    SglangEagleLayout(),
    EagleLayout(),
)
"""In the order in which they are recognised."""

NAMES = tuple(sorted({layout.name for layout in LAYOUTS}))


@dataclass(frozen=True, slots=True)
class Found:
    """A head, and the files that it was read from."""

    head: Head
    layout: Layout
    stored: Stored

    def obstacles(self, engine: str, wanted: Wanted = Wanted()) -> list[str]:  # noqa: B008
        """Why an engine's own implementation does not load these files as they are; none where it does."""
        about, method = ENGINES[engine], self.head.config.method
        if method not in about.native:
            return [f"{about.title} has no {method} of its own"]
        if engine not in self.layout.engines:
            return ["it does not read this layout"]
        return self.layout.obstacles(self.head, self.stored.config, engine, wanted)


def read_head(folder: str | Path) -> Head:
    """Read a head of any layout, and check it; costs one pass over its weights.

    Raises:
        ConfigError: it cannot be read, is no head, or is broken; see :mod:`spec_plugins.checkpoints.files`
            and :func:`spec_plugins.checkpoints.check_head`. Nothing in the files is run.
    """
    return find_head(read_folder(folder)).head


def find_head(stored: Stored, on_tensor: Callable[[str], None] = lambda name: None) -> Found:
    """The head in a folder that was read, checked; raises as :func:`read_head`.

    ``on_tensor`` is told each tensor's name when its turn comes.
    """
    layout = next((layout for layout in LAYOUTS if layout.recognises(stored)), None)
    if layout is None:
        what = "a causal language model: draft with it as it is, by the method draft_model"
        raise ConfigError(
            f"{stored.folder}: no layout of a head that is known ({', '.join(NAMES)})"
            + (f"; it is {what}" if is_draft_model(stored) else "")
        )
    try:
        head = layout.read(stored)
        check_head(head, lambda name: layout.stored_name(name, head.config), on_tensor)
    except ConfigError as error:
        raise ConfigError(f"{stored.folder}: {error}") from None
    return Found(head, layout, stored)


def is_draft_model(stored: Stored) -> bool:
    """Whether a folder holds no head but a causal language model, which drafts as it is."""
    named = stored.config.get("architectures")
    causal = isinstance(named, list) and any(str(n).endswith(("ForCausalLM", "LMHeadModel")) for n in named)
    return causal and not any(layout.recognises(stored) for layout in LAYOUTS)


def check_layout(name: str, method: str) -> Layout:
    """The layout of this name for heads of a method.

    Raises:
        ConfigError: there is no such layout.
        UnsupportedError: not for this method, or not in this version; names the nearest.
    """
    found = [layout for layout in LAYOUTS if layout.name == name]
    able = [layout for layout in found if method in layout.methods]
    if able:
        return able[0]
    others = ", ".join(layout.name for layout in LAYOUTS if method in layout.methods)
    if name == "tensorrt-llm":
        if method == "eagle3":
            raise UnsupportedError(
                "TensorRT-LLM's engine builder has no eagle3. Nearest: --to eagle, for its PyTorch backend: "
                f"{ENGINES[name].native[method]}"
            )
        raise UnsupportedError(
            "for TensorRT-LLM's engine builder a head is written into the target's checkpoint: `spec-plugins "
            "convert --to tensorrt-llm --target CHECKPOINT`"
        )
    if not found:
        raise ConfigError(f"{name!r} is no layout{suggest(name, list(NAMES))} Known: {', '.join(NAMES)}")
    if name in ENGINES and method not in ENGINES[name].native:
        about = explain(name, method)
        instead = about.plugin if about.route == "plugin" else f"Nearest: {about.nearest}"
        raise UnsupportedError(
            f"{ENGINES[name].title} has no {method} of its own, so there is nothing to convert to. {instead}"
        )
    raise UnsupportedError(f"the layout {name} has no place for {method}. Nearest: --to one of {others}")


def write_head(
    head: Head,
    folder: str | Path,
    layout: str,
    wanted: Wanted = Wanted(),  # noqa: B008
    on_tensor: Callable[[str], None] = lambda name: None,
) -> Head:
    """Write a head in a layout, into a folder that is new or empty and appears when it is whole.

    Args:
        head: left as it is.
        folder: gets ``config.json`` and one file of safetensors.
        layout: one of :data:`NAMES`.
        wanted: what else the layout may need; with a target, the head must fit it.
        on_tensor: told each tensor's name when its turn comes.

    Returns:
        What was written: the head, and what came from the target.

    Raises:
        ConfigError: no such layout, a head that is broken or does not fit, a folder that is in use.
        UnsupportedError: the layout cannot hold the head; names what would be lost. Nothing is written.
    """
    chosen = check_layout(layout, head.config.method)
    check_free(folder)
    check_head(head)
    if wanted.target is not None:
        check_fits(head.config, wanted.target)
    whole = chosen.complete(head, wanted)
    if lost := chosen.lost(whole, wanted):
        raise UnsupportedError(
            f"the layout {layout} would lose {'; '.join(lost)}. Nothing was written. Nearest: --to "
            "spec-plugins, which holds everything"
        )
    write_folder(folder, chosen.config(whole, wanted), chosen.tensors(whole), chosen.weights, on_tensor)
    return whole
