"""What a third-party package may implement.

A package makes its proposers known with an entry point in the group ``spec_plugins`` that names a
module (or object) with this hook::

    [options.entry_points]
    spec_plugins =
        acme = acme_drafters.plugin

    # acme_drafters/plugin.py
    from spec_plugins import hookimpl

    @hookimpl
    def spec_plugins_proposers():
        return {"acme": "acme_drafters.acme:AcmeProposer"}
"""

from __future__ import annotations

from collections.abc import Mapping

import pluggy

__all__ = ["hookimpl", "hookspec", "spec_plugins_proposers", "spec_plugins_redact"]

hookspec = pluggy.HookspecMarker("spec_plugins")
hookimpl = pluggy.HookimplMarker("spec_plugins")


@hookspec
def spec_plugins_proposers() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Name the proposers of a package.

    Returns:
        ``{name: "package.module:Class"}``; the module is imported when the name is first used.
        Names are lower-case letters, digits, ``_`` and ``-``; a name that is taken is refused.
    """


@hookspec
def spec_plugins_redact(text: str) -> str:  # type: ignore[empty-body]
    """Take out of a recorded text what must not be kept: names, keys, addresses.

    Called for every text of a traffic file as it is read, before anything is stored, trained on, measured or
    shown. Where several packages have it, each gets what the one before left.

    Returns:
        The text without it. The same for the same text: a replacement that differs each time would hide from
        proposers that text repeats itself. Whatever it raises leaves out the line, with the exception's type
        for a reason.
    """
