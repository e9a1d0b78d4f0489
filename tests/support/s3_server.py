"""An S3 server on this machine, for tests of runs whose files are in an object store."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from store import storage

BUCKET = "bucket"
SERVER = """
import sys, threading
import pyarrow.fs as pafs
from moto.server import ThreadedMotoServer
host, bucket = sys.argv[1:]
server = ThreadedMotoServer(host, 0, verbose=False)
server.start()
port = server.get_host_and_port()[1]
made = f"s3://{bucket}?endpoint_override=http://{host}:{port}&scheme=http&region=us-east-1"
pafs.FileSystem.from_uri(f"{made}&allow_bucket_creation=true")[0].create_dir(bucket)
print(port, flush=True)
threading.Event().wait()
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    pid: int
    host: str
    port: int

    def uri(self, name: str) -> str:
        return f"s3://{BUCKET}/{name}?endpoint_override=http://{self.host}:{self.port}&scheme=http&region=us-east-1"

    def objects(self, name: str) -> dict[str, int]:
        return {file.path: file.n_bytes for file in storage.open_storage(self.uri(name)).files("")}


@contextmanager
def s3_server(log: Path, *, host: str = "127.0.0.1", enter: Sequence[str] = ()) -> Iterator[Server]:
    """Give a server on a port of its own choice, with one bucket. Its credentials come from the
    environment, as anybody's. `enter` starts it elsewhere, in a network that has the address `host`.
    """
    with pytest.MonkeyPatch.context() as patch, log.open("wb") as output:
        for name, value in (
            ("ACCESS_KEY_ID", "k"),
            ("SECRET_ACCESS_KEY", "s"),
            ("EC2_METADATA_DISABLED", "true"),
        ):
            patch.setenv(f"AWS_{name}", value)
        command = [*enter, sys.executable, "-c", SERVER, host, BUCKET]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output, text=True)
        try:
            assert process.stdout is not None
            port = process.stdout.readline()
            assert port, log.read_text()
            yield Server(pid=process.pid, host=host, port=int(port))
        finally:
            process.kill()
            process.wait()
