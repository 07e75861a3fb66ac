"""What importing costs."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.case import Context, Result, alternate, case, spread


@case("import-time")
def import_time(context: Context) -> Result:
    """Seconds to start Python and import, against what importing numpy and pluggy alone takes."""
    lines = {
        "nothing": "pass",
        "numpy, pluggy": "import numpy, pluggy",
        "spec_plugins": "import spec_plugins",
        "spec_plugins.registry": "from spec_plugins.registry import registry; registry()",
    }
    seconds = alternate(
        {
            name: lambda line=line: subprocess.run([sys.executable, "-c", line], check=True)  # type: ignore[misc]
            for name, line in lines.items()
        },
        3 if context.quick else 15,
    )
    result = Result(["import", "seconds", "more than Python alone"])
    for name, values in seconds.items():
        more = [a - b for a, b in zip(values, seconds["nothing"], strict=True)]
        result.rows.append([name, spread(values, 3), spread(more, 3)])
    return result
