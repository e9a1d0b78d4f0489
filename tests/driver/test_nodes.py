"""Test how long episodes may go on where a node leaves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from driver import nodes


def test_a_part_of_each_notice_is_kept_for_the_last_commits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nodes, "time", SimpleNamespace(time=lambda: 1000.0))
    for notice_s, episodes_s in ((30.0, 20.0), (15.0, 5.0), (5.0, 0.0), (-3.0, 0.0), (600.0, 20.0)):
        assert nodes.grace_s(1000.0 + notice_s) == episodes_s
    assert nodes.grace_s(0.0) == 20.0, "Ray names no deadline"
