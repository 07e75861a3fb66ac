"""What every engine is asked."""

from __future__ import annotations

from tiny_model import prompts_of_tiny_model

ALONE = [[*prompt, *more] for prompt in prompts_of_tiny_model()[::3] for more in ([], [77, 78])]
"""One after the other; each prompt twice, so that answers are in the cache."""
TOGETHER = [[*prompt, 90, 91] for prompt in prompts_of_tiny_model()]
BATCHES = [*([prompt] for prompt in ALONE), TOGETHER]
