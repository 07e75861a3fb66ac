"""The limit that a request sets for itself."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from spec_plugins.request_switch import SWITCH, RequestSwitch


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [
        (None, 8), ({}, 8), ({"other": 1}, 8), ("text", 8), ({SWITCH: None}, 8), ({SWITCH: 0}, 0),
        ({SWITCH: 3}, 3), ({SWITCH: 2.0}, 2), ({SWITCH: 99}, 8), ({SWITCH: float("inf")}, 8),
    ],
)  # fmt: skip
def test_limits(arguments: Any, limit: int) -> None:
    assert RequestSwitch(8).wanted(arguments) == limit


@pytest.mark.parametrize("value", [-1, 1.5, "3", True, float("nan"), [1]])
def test_a_bad_value_counts_as_none_and_is_named_once(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    switch = RequestSwitch(8)
    with caplog.at_level(logging.WARNING, "spec_plugins"):
        assert [switch.wanted({SWITCH: value}) for _ in range(3)] == [8] * 3
    (record,) = caplog.records
    assert repr(value) in record.getMessage()
    assert "set it to a whole number" in record.getMessage()
