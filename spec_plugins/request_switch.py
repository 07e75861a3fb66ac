"""The per-request switch: a request's own limit on its drafts, through whatever an engine passes on."""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["SWITCH", "RequestSwitch"]

logger = logging.getLogger("spec_plugins")

SWITCH = "spec_plugins_num_speculative_tokens"
"""At most so many draft tokens in a row; 0 opts out."""


class RequestSwitch:
    """Reads :data:`SWITCH`; a value that cannot be used counts as none, with one warning."""

    def __init__(self, most: int) -> None:
        """
        Args:
            most: what a request gets that says nothing.
        """
        self.most = most
        self._warned = False

    def wanted(self, arguments: Any) -> int:
        """A request's limit, out of the mapping of extra arguments that came with it, if any."""
        value = arguments.get(SWITCH) if isinstance(arguments, dict) else None
        if value is None:
            return self.most
        # JSON may bring 2.0 for 2, or an infinity.
        number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else -1
        if number >= 0 and number % 1 == 0:
            return min(int(number), self.most)
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s: %r cannot be used; set it to a whole number, 0 for no drafts. The request drafts as "
                "without it (logged once)",
                SWITCH,
                value,
            )
        return self.most
