"""Proposers of the tests, found by their entry point, as those of an installed package are."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["plug_in"]


def plug_in(folder: Path, module: Path) -> None:
    """Let this process, and those that it starts, find the proposers of a module.

    Args:
        folder: empty; gets what an installation would leave.
        module: the module's file, which has a ``spec_plugins_proposers`` hook.
    """
    about = folder / "spec_plugins_tests-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: spec-plugins-tests\nVersion: 0\n")
    (about / "entry_points.txt").write_text(f"[spec_plugins]\ntests = {module.stem}\n")
    added = [str(folder), str(module.parent), str(Path(__file__).parent)]
    sys.path += added
    os.environ["PYTHONPATH"] = os.pathsep.join([*added, *filter(None, [os.environ.get("PYTHONPATH")])])
