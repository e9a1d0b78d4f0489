"""Names, passwords and queries of URLs are taken out of what somebody else may read."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from unittest import mock

import pytest

from envs.search.client import ask_server
from store import Catalog, RunLayout, export, write_open_sql
from url_secrets import public_url, without_secrets


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("the server at http://ann:pa55@host/x answered", "the server at http://host/x answered"),
        ("http://ann:p@ss@host:8000", "http://host:8000"),
        ("s3://bucket/run?region=x&rm", "s3://bucket/run?region=x&rm"),
        ("'HTTPS://host/?a=1&API-Key=abc&b=2' is gone", "'HTTPS://host/?... is gone"),
        ("http://host/?key='abc'&api%5Fkey=1&key[]=2&sig=3 hm?", "http://host/?... hm?"),
        (
            "exceeded with url: /search?api_key=5 (no route)",
            "exceeded with url: /search?... (no route)",
        ),
        ("http://host/x#a?token=S is gone", "http://host/x#... is gone"),
        (r"http:\/\/ann:pa55@host\/x?k=S", r"http://host\/x?..."),
        ("ann@host wrote http://host/@tag", "ann@host wrote http://host/@tag"),
    ],
)
def test_a_url_in_a_text_is_shown_without_its_secrets(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


@pytest.mark.parametrize("piece", ["http://", "://", "http://a?", "://a:", "http://#"])
def test_a_text_of_urls_only_is_looked_through_at_once(piece: str) -> None:
    """100 KB took 18 s, read again from every beginning of a URL; these 20 MB would take days."""
    assert len(without_secrets(piece * (20_000_000 // len(piece)))) > 0


def test_a_url_is_shown_without_login_and_query() -> None:
    assert public_url("http://ann:pa55@host/x?n=1#top") == "http://host/x"
    assert public_url("http://ann:corr3ct horse@host/x") == "http://host/x"
    assert (
        public_url("http://ann:c0rr#ct@host/x") == public_url("http://host?a=b@c") == "http://..."
    )
    assert without_secrets("ws://host/ws?key=5ecret is gone") == "ws://host/ws?... is gone"
    assert public_url("no url?") == "no url?"


@pytest.mark.parametrize("url", ["http://ann:5ecret@h:99999/x", "ftp://ann:5ecret@h/x"])
def test_a_search_servers_wrong_url_is_quoted_without_its_secrets(url: str) -> None:
    with pytest.raises(ValueError, match="has no valid URL; change") as told:
        asyncio.run(ask_server(url, "q", topk=1))
    assert "5ecret" not in str(told.value)


def test_a_search_servers_url_is_quoted_without_its_secrets() -> None:
    """The attack: its password has a space, and so was not found in the message."""
    url = "http://ann:corr3ct horse@127.0.0.1:9/retrieve?key='5ecret'"
    with mock.patch("envs.search.client.PAUSES_S", ()), pytest.raises(ConnectionError) as told:
        asyncio.run(ask_server(url, "who?", topk=1))
    assert "http://127.0.0.1:9/retrieve" in str(told.value)
    assert not re.search("horse|5ecret", str(told.value))


def test_no_event_and_no_reason_has_the_password_of_a_url(tmp_path: Path) -> None:
    """The attack: a retrieval server's URL was in an event, and so in report.html."""
    url = "http://ann:pa55@host/retrieve?key=5ecret"
    layout = RunLayout.create(tmp_path / "run", config_yaml="")
    with Catalog.open(layout) as catalog:
        write_open_sql(layout, macros=(), max_staleness=4)
        catalog.log(component="w0", what="episode failed", detail=f"the server at {url} is gone")
        catalog.heartbeats({"w0": f"a reply of {url}"})
        group = catalog.open_group(
            ordinal=0, task_id="t", split="train", size=1, evaluated_version=None
        )
        catalog.lease_open_group(worker="w0", lease_s=60.0)
        catalog.give_up(group.group_uid, worker="w0", state="abandoned", reason=f"{url} is gone")
        export(catalog, layout)
    for path in layout.root.rglob("*"):
        if path.is_file():
            assert not re.search(b"pa55|5ecret", path.read_bytes()), path
