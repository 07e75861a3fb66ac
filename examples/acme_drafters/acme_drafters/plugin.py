"""Tells spec-plugins which proposers this package has; imported whenever proposers are listed."""

from spec_plugins import hookimpl


@hookimpl
def spec_plugins_proposers() -> dict[str, str]:
    return {"acme-bigram": "acme_drafters.bigram:BigramProposer"}
