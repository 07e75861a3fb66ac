"""Every measured comparison, as a named case: ``python -m benchmarks --list``."""
