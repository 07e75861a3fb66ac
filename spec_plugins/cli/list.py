"""``spec-plugins list``."""

from __future__ import annotations

from dataclasses import asdict

from spec_plugins.cli.output import AsJson, show_json, show_table, show_warning

__all__ = ["list_command"]


def list_command(as_json: AsJson = False) -> None:
    from spec_plugins.doctor import proposers
    from spec_plugins.registry import registry

    found, faults = proposers(), registry().faults
    if as_json:
        show_json({"proposers": [asdict(p) for p in found], "faults": faults})
        return
    show_table(
        ("name", "from", "usable", "needs", "summary"),
        [
            (
                p.name,
                p.provider,
                "yes" if p.usable else "no",
                "its parts'" if p.needs is None else ", ".join(p.needs) or "-",
                p.summary if p.usable else p.reason,
            )
            for p in found
        ],
    )
    for fault in faults:
        show_warning(fault)
