"""A URI leads a client to no server but the one that it may name, and no login's token away."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from store import StoreError, UnavailableError
from store.storage import RemoteStorage, open_storage

SEEN = b"what only this network may read"


class _Handler(BaseHTTPRequestHandler):
    """Answer with a redirect to the server's `leads_to`, or with SEEN."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        leads_to, status = self.server.leads_to  # type: ignore[attr-defined]
        self.send_response(status)
        if leads_to:
            self.send_header("Location", f"{leads_to}{self.path}")
        self.send_header("Content-Length", "0" if leads_to else str(len(SEEN)))
        self.end_headers()
        if self.command == "GET" and not leads_to:
            self.wfile.write(SEEN)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None: ...


@contextmanager
def server(*, leads_to: str = "", status: int = 200) -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as made:
        made.asked, made.leads_to = [], (leads_to, status)  # type: ignore[attr-defined]
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


@pytest.mark.parametrize("status", [301, 302, 307, 308])
@pytest.mark.parametrize("region", ["", "&region=us-east-1", "&%72egion=us-east%2D1"])
def test_a_server_leads_its_client_to_no_other_server(
    region: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: the client asked any address of the user's network, with AWS_SESSION_TOKEN."""
    for name, value in (
        ("ACCESS_KEY_ID", "k"),
        ("SECRET_ACCESS_KEY", "s"),
        ("SESSION_TOKEN", "t"),
        ("EC2_METADATA_DISABLED", "true"),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    with server() as other:
        address = f"http://localhost:{other.server_address[1]}"
        with server(leads_to=address, status=status) as asked:
            port = asked.server_address[1]
            storage = open_storage(
                f"s3://bucket/run?endpoint_override=http://127.0.0.1:{port}&scheme=http{region}"
            )
            for ask in (storage.exists, storage.read, lambda path: list(storage.files(path))):
                with pytest.raises(UnavailableError, match=f"HTTP status {status}.*check the URI"):
                    ask("run.json")
        assert asked.asked, "the server that the URI names"  # type: ignore[attr-defined]
        assert other.asked == []  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "uri",
    [
        "gs://bucket/run?endpoint_override=evil.test&scheme=http",
        "gcs://bucket/run?scheme=http&%65ndpoint_override=evil.test",
        "GS://bucket/run?Endpoint_Override=evil.test",
        "abfs://acct.blob.core.windows.net/c/run?blob_storage_authority=.evil.test",
        "abfss://acct.dfs.core.windows.net/c/run?dfs_storage_authority=evil.test",
        # Arrow reads a name only up to a NUL.
        "gs://bucket/run?endpoint_override%00=evil.test",
        "abfs://acct.blob.core.windows.net/c/run?blob_storage_authority%00x=.evil.test",
        "s3://bucket/run?endpoint_override%00=evil.test",
        "s3://bucket/run?endpoint_override=mine.test&region=us-east-1%00x",
        "s3://bucket/run%00?endpoint_override=mine.test",
        # Of two Arrow takes the first.
        "s3://bucket/run?endpoint_override=mine.test&region=us-east-1&region=r",
        "gs://bucket/run?scheme=http",  # the token could be read on its way
        "abfs://acct.blob.core.windows.net/c/run?enable_tls=false",
        "s3://bucket/run?tls_verify_certificates=false",
        "gs://evil.test:443/run",
        "gs://bucket%00/run",
        "abfs://evil.test/c/run",
        "abfs://acct.blob.core.windows.net.evil.test/c/run",
        "abfs://evil%2etest:443/c/run",
    ],
)
def test_no_server_but_their_own_is_sent_the_token_of_a_login(uri: str) -> None:
    """The attack: `gigpo fetch` of a URI from a stranger sent him the user's Google token."""
    refused = r"would be sent the token of your login|control characters|is no \w+:// bucket"
    with pytest.raises(StoreError, match=refused):
        open_storage(uri)


@pytest.mark.parametrize(
    "uri",
    [
        "gs://bucket/run",
        "gs://bucket/run?project_id=p&retry_limit_seconds=3",
        "abfs://acct.dfs.core.windows.net/c/run?credential_kind=anonymous",
        "abfs://container/run",
        "abfss://acct.dfs.core.windows.net/c/run",
        "s3://bucket/run?endpoint_override=mine.test&region=r&scheme=http",
        "s3://bucket/run?allow_bucket_creation=true&tls_ca_file_path=%2Fmine%26b.pem&region=r",
    ],
)
def test_their_own_servers_are_asked(uri: str) -> None:
    assert isinstance(open_storage(uri), RemoteStorage)


def test_arrow_is_given_the_options_that_were_checked() -> None:
    """Their names and values are quoted anew, and so read in one way only."""
    storage = RemoteStorage("s3://bucket/run?%72egion=r%26scheme%3Dhttp&endpoint_override=a:1")
    asked = "region=r%26scheme%3Dhttp&endpoint_override=a%3A1&allow_delayed_open=true"
    assert storage._uri == f"s3://bucket/run?{asked}"


@pytest.mark.parametrize("option", ["%61ccess_key=a", "secret_key=b", "Account_Key=c"])
def test_a_uri_has_no_credentials(option: str) -> None:
    with pytest.raises(StoreError, match="with credentials would be stored in the run"):
        open_storage(f"s3://bucket/run?{option}")
