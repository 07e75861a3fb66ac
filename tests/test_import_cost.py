"""``import spec_plugins`` stays light: every engine worker and every command line pays for it."""

from __future__ import annotations

import json
import subprocess
import sys

CODE = """
import sys
before = set(sys.modules)
import spec_plugins
added = set(sys.modules) - before
# Extension modules add names that are no packages and have no file.
files = {name.partition(".")[0] for name in added if getattr(sys.modules[name], "__file__", None)}
print(__import__("json").dumps([sorted(sys.modules), sorted(files - set(sys.stdlib_module_names))]))
"""


def test_import_loads_numpy_and_pluggy_only() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", CODE], check=True, capture_output=True, text=True
    )
    loaded, added = json.loads(done.stdout)
    heavy = {"torch", "numba", "pydantic", "typer", "rich", "transformers", "scipy", "matplotlib", "yaml"}
    # The times tell who imported what.
    assert not heavy & set(loaded), done.stderr
    assert set(added) == {"spec_plugins", "numpy", "pluggy"}, done.stderr
