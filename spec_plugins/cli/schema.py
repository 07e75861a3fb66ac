"""``spec-plugins schema``."""

from __future__ import annotations

from typing import Annotated

import typer

from spec_plugins.cli.output import show_json

__all__ = ["schema_command"]


def schema_command(
    proposer: Annotated[
        str | None, typer.Option(help="Print only the options of this proposer.", metavar="NAME")
    ] = None,
) -> None:
    from spec_plugins.config import json_schema, options_model
    from spec_plugins.registry import registry

    if proposer is None:
        show_json(json_schema())
    else:
        show_json(options_model(registry().find(proposer).load()).model_json_schema())
