"""Reads a log a line at a time, so that its size does not matter."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from spec_plugins.errors import ConfigError
from spec_plugins.traffic.formats import parse, redacted
from spec_plugins.traffic.record import Record
from spec_plugins.traffic.tags import tag_of

__all__ = ["NOTHING_USABLE", "SHOWN_FAULTS", "TrafficFile"]

SHOWN_FAULTS = 3
KEPT_FAULTS = 1000
NOTHING_USABLE = (
    "a line is an object with 'messages', or with 'prompt' and 'response' or 'token_ids', or of another form "
    "that docs/evaluation.md names"
)


class TrafficFile:
    """The records of a ``.jsonl`` or ``.jsonl.gz`` file; iterating reads it, from its start each time.

    A line that cannot be used is left out and counted. Every text has been through ``redact`` before anybody
    else sees it, and so have the reasons for leaving lines out.
    """

    def __init__(self, path: Path, redact: Callable[[str], str] | None = None) -> None:
        """
        Args:
            path: the file.
            redact: applied to every text. ``None``: what installed packages bring
                (:func:`spec_plugins.hookspecs.spec_plugins_redact`).
        """
        if redact is None:
            from spec_plugins.registry import registry

            redact = registry().redact
        self.path, self.redact = path, redact if redact is str else _careful(redact)
        self.faults: list[str] = []
        """The first 1,000 lines that were left out, each with its number and the reason."""
        self.left_out = 0
        """How many were."""
        self.sha256 = ""
        """Of the whole file, as it was read; known at its end."""

    def __iter__(self) -> Iterator[Record]:
        """
        Raises:
            ConfigError: the file cannot be read.
        """
        self.faults, self.left_out, self.sha256 = [], 0, ""
        digest = hashlib.sha256()
        try:
            with gzip.open(self.path, "rb") if self.path.suffix == ".gz" else self.path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    digest.update(line)
                    if line.strip():
                        record = self._record(number, line)
                        if record is not None:
                            yield record
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(f"data: cannot read {str(self.path)!r}: {error}") from error
        self.sha256 = digest.hexdigest()

    def _record(self, number: int, line: bytes) -> Record | None:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # its words show nothing of the line
            whole = number == 1 and line.lstrip()[:1] == b"["
            hint = " (a list over several lines? write an object a line: jq -c '.[]')" if whole else ""
            self.leave_out(number, f"{error}{hint}")
            return None
        try:
            record = parse(row if self.redact is str else redacted(row, self.redact), number)
            return record if record.tags else dataclasses.replace(record, tags=(tag_of(record),))
        except Exception as error:  # a line can hold anything
            self.leave_out(number, f"no {error}" if isinstance(error, KeyError) else str(error))
            return None

    def leave_out(self, number: int, reason: str) -> None:
        """Count a line that cannot be used, also where that shows only later."""
        self.left_out += 1
        if len(self.faults) < KEPT_FAULTS:
            self.faults.append(f"line {number}: {reason}")

    def told(self) -> str:
        """What was left out, for people; empty where nothing was."""
        if not self.left_out:
            return ""
        more = f" and {self.left_out - SHOWN_FAULTS} more" if self.left_out > SHOWN_FAULTS else ""
        return f"left out {self.left_out} lines: {'; '.join(self.faults[:SHOWN_FAULTS])}{more}"

    def refuse(self) -> ConfigError:
        """The error to raise where no line could be used."""
        seen = "; ".join(self.faults[:SHOWN_FAULTS]) or "it is empty"
        return ConfigError(f"data: no line of {str(self.path)!r} can be used ({seen}); {NOTHING_USABLE}")


def _careful(redact: Callable[[str], str]) -> Callable[[str], str]:
    """Errors of a package's redaction could show what it was to hide."""

    def apply(text: str) -> str:
        try:
            return redact(text)
        except Exception as error:
            raise ValueError(f"the redaction failed with {type(error).__name__}") from None

    return apply
