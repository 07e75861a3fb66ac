"""Every error that this project raises on purpose."""

from __future__ import annotations

__all__ = ["ConfigError", "SpecPluginsError", "UnavailableError", "UnknownProposerError", "UnsupportedError"]


class SpecPluginsError(Exception):
    """Base of the project's errors. The message is meant for the user: what, why, and the fix."""


class ConfigError(SpecPluginsError, ValueError):
    """A configuration that cannot be used; names the field, the value and the fix."""


class UnknownProposerError(SpecPluginsError, LookupError):
    """No proposer is registered under this name; suggests near ones."""


class UnavailableError(SpecPluginsError, ImportError):
    """A registered proposer cannot be imported; names what is missing and how to install it."""


class UnsupportedError(SpecPluginsError, ValueError):
    """A combination of proposer, target and engine that cannot work; names the nearest that does."""
