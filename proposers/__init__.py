"""The project's own proposers, one file a method."""

from __future__ import annotations

from spec_plugins.hookspecs import hookimpl


@hookimpl
def spec_plugins_proposers() -> dict[str, str]:
    """Names of the built-in proposers."""
    return {
        "ngram": "spec_plugins.proposers.ngram:NgramProposer",
        "suffix": "spec_plugins.proposers.suffix:SuffixProposer",
        "lookahead": "spec_plugins.proposers.lookahead:LookaheadProposer",
        "combine": "spec_plugins.proposers.combine:CombineProposer",
        "draft_model": "spec_plugins.proposers.draft_model:DraftModelProposer",
        "medusa": "spec_plugins.proposers.medusa:MedusaProposer",
        "eagle": "spec_plugins.proposers.eagle:EagleProposer",
        "eagle3": "spec_plugins.proposers.eagle:Eagle3Proposer",
        "calibration": "spec_plugins.proposers.calibration:CalibrationProposer",
    }
