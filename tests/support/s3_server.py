"""An S3 server on this machine, for tests of runs whose files are in an object store."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow.fs as pafs
import pytest

from store import storage

BUCKET = "bucket"
SERVER = """
import threading
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
threading.Event().wait()
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    pid: int
    port: int

    def uri(self, name: str) -> str:
        return f"s3://{BUCKET}/{name}?endpoint_override=http://127.0.0.1:{self.port}&scheme=http&region=us-east-1"

    def objects(self, name: str) -> dict[str, int]:
        return {file.path: file.n_bytes for file in storage.open_storage(self.uri(name)).files("")}


@contextmanager
def s3_server(log: Path) -> Iterator[Server]:
    """Give a server on a port of its own choice, with one bucket. Its credentials come from the
    environment, as anybody's.
    """
    with pytest.MonkeyPatch.context() as patch, log.open("wb") as output:
        for name, value in (
            ("ACCESS_KEY_ID", "k"),
            ("SECRET_ACCESS_KEY", "s"),
            ("EC2_METADATA_DISABLED", "true"),
        ):
            patch.setenv(f"AWS_{name}", value)
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=output, text=True
        )
        try:
            assert process.stdout is not None
            port = process.stdout.readline()
            assert port, log.read_text()
            found = Server(pid=process.pid, port=int(port))
            pafs.FileSystem.from_uri(f"{found.uri('')}&allow_bucket_creation=true")[0].create_dir(
                BUCKET
            )
            yield found
        finally:
            process.kill()
            process.wait()
