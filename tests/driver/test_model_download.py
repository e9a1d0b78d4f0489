"""Models named by their repository: downloaded once, from a small server that speaks the Hub's
protocol.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import configs
from cli.__main__ import main
from configs import ActorsConfig, Config, ConfigError, ModelConfig
from driver import model_download as hub
from driver.environment_check import try_tasks
from driver.hub_process import LEAST_FILE_BYTES
from driver.model_download import Repository
from driver.preflight import make_or_open_run
from store.reading import landlock

ROOT = Path(__file__).resolve().parents[2]
KEY_ROOM = str(ROOT / "configs" / "key_room.yaml")
NAME = "org/Tiny-1B"
OLD, NEW = "a" * 40, "b" * 40
WEIGHTS = os.urandom(12_000_000)
PIECE_BYTES = 10 * 1024**2  # huggingface_hub writes so many at once
FILES = {
    "config.json": b'{"model_type": "qwen2", "dtype": "bfloat16"}',
    "tokenizer_config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"the same weights again",
    "onnx/model.json": b"{}",
}


@dataclass
class Hub:
    """One repository. `stops_at`: after so many bytes of the weights nothing more is sent."""

    url: str = ""
    commit: str = OLD
    stops_at: int | None = None
    etag: str | None = None  # of every file, instead of its digest
    sha: str | None = None  # of the repository, instead of the commit
    missing: str | None = None  # the commit with which it answers that no file is there
    digest: str | None = None  # of every file in the list of files
    size: int | None = None  # of every file in that list
    name: str | None = None  # of a further file in that list
    headers: dict[str, str] = field(default_factory=dict)  # more, of every answer
    extra_bytes: int = 0  # that the weights have beyond what was said
    padding: int = 0  # bytes before the answer about the repository
    released: threading.Event = field(default_factory=threading.Event)
    asked: list[str] = field(default_factory=list)  # METHOD path range


def handler(state: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def answer(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            more = {"Content-Length": str(len(body)), **state.headers, **headers}
            for name, value in more.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            state.asked.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
            if found := re.fullmatch(rf"/api/models/{NAME}/revision/(\w+)", path):
                commit = state.commit if found[1] == "main" else found[1]
                about = {"id": NAME, "sha": state.sha or commit, "siblings": []}
                self.answer(200, b" " * state.padding + json.dumps(about).encode())
            elif re.fullmatch(rf"/api/models/{NAME}/tree/[ab]+", path):
                tree = [
                    {
                        "type": "file",
                        "path": name,
                        "size": len(data) if state.size is None else state.size,
                        "oid": oid(data),
                        "lfs": {"size": len(data), "oid": state.digest, "pointerSize": 1}
                        if state.digest
                        else None,
                        "xetHash": "a" * 64 if state.digest else None,
                    }
                    for name, data in {**FILES, **({state.name: b""} if state.name else {})}.items()
                ]
                self.answer(200, json.dumps(tree).encode(), Content_Type="application/json")
            elif state.missing and self.command == "HEAD":
                self.answer(404, b"", X_Error_Code="EntryNotFound", X_Repo_Commit=state.missing)
            elif found := re.fullmatch(rf"/{NAME}/resolve/([ab]+)/(.+)", path):
                self.file(FILES[found[2]], commit=found[1])
            else:
                self.answer(404, b"", X_Error_Code="RepoNotFound")

        do_HEAD = do_GET

        def file(self, data: bytes, *, commit: str) -> None:
            start = int(re.sub(r"\D", "", self.headers.get("Range", "bytes=0-").partition("-")[0]))
            headers = {
                "ETag": f'"{state.etag or oid(data)}"',
                "X-Repo-Commit": commit,
                "Accept-Ranges": "bytes",
            }
            if self.command == "GET" and data is WEIGHTS and state.extra_bytes:
                self.send_response(200)
                for name, value in {**headers, "Transfer-Encoding": "chunked"}.items():
                    self.send_header(name, value)
                self.end_headers()
                with suppress(OSError):  # until nobody reads any more
                    for _ in range(state.extra_bytes >> 20):
                        self.wfile.write(b"100000\r\n" + bytes(1 << 20) + b"\r\n")
                    self.wfile.write(b"0\r\n\r\n")
                self.close_connection = True
                return
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            if self.command == "GET" and data is WEIGHTS and state.stops_at is not None:
                self.send_response(200)
                for name, value in {**headers, "Content-Length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data[: state.stops_at])
                state.released.wait()
                self.close_connection = True
                return
            self.answer(206 if start else 200, data[start:], **headers)

    return Handler


def oid(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub, to which all of this test's processes are pointed, and an empty cache."""
    state = Hub()
    with ThreadingHTTPServer(("127.0.0.1", 0), handler(state)) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        state.url = f"http://127.0.0.1:{listening.server_address[1]}"
        wanted = {
            "HF_ENDPOINT": state.url,
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1",
            "HF_HUB_DISABLE_XET": "1",
        }
        for name, value in {**wanted, "HF_HUB_CACHE": str(tmp_path / "cache")}.items():
            monkeypatch.setenv(name, value)
        yield state
        state.released.set()
        listening.shutdown()
        thread.join()


def with_model(config: Config) -> tuple[Config, str]:
    """The config with its model's directory, and what was shown."""
    out = io.StringIO()
    return hub.with_model(config, Console(file=out, width=500, markup=False)), out.getvalue()


def asking(**model: Any) -> Config:
    return Config(run_dir="run", model=ModelConfig(path=NAME, **model))


def test_heads_that_an_engine_cannot_divide_are_refused_once_the_config_is_here(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name says nothing about the heads. The dry run of a downloaded model refuses it too."""
    sizes = {
        "model_type": "qwen2",
        "num_attention_heads": 6,
        "hidden_size": 96,
        "num_hidden_layers": 1,
        "intermediate_size": 66,
        "vocab_size": 100,
    }
    monkeypatch.setitem(FILES, "config.json", json.dumps(sizes).encode())
    config = replace(asking(), actors=ActorsConfig(gpus_per_worker=4))
    configs.check_heads(config)
    for look in (with_model, hub.try_model):
        with pytest.raises(ConfigError, match="split 6 attention heads .* over 4 GPUs"):
            look(config)
    with_model(replace(config, actors=ActorsConfig(gpus_per_worker=3)))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"learner": {"ranks": 2, "sequence_parallel": 2}}, "learner.sequence_parallel=2"),
        ({"learner": {"ranks": 2, "zero_stage": 3}}, "learner.zero_stage=3"),
        ({"model": {"lora_rank": 8, "dtype": "bfloat16"}}, "model.lora_rank=8"),
    ],
)
def test_what_a_vision_model_refuses_is_told_before_the_download(
    server: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, dict[str, Any]],
    named: str,
) -> None:
    config = asking(**settings.get("model", {}))
    config = replace(config, learner=replace(config.learner, **settings.get("learner", {})))
    _, missing, _ = hub.try_model(config)
    assert missing[1:] == [
        f"whether model.path={NAME} reads images is checked once it is here; a vision model is "
        f"refused with {named}"
    ]
    assert len(hub.try_model(asking())[1]) == 1  # nothing of it depends on the images

    def about(path: str) -> list[str]:
        return hub.try_model(replace(config, model=replace(config.model, path=path)))[1][1:]

    assert named in about("/nowhere/Tiny-1B")[0]
    (line,) = about("/nowhere/Qwen2.5-VL-3B")
    assert f"is a vision model by its name, so it is refused with {named} once" in line
    assert about("/nowhere/Qwen2.5-3B") == []

    # the cache has its config.json, and not yet its weights
    repository = tmp_path / "cache" / "models--org--Tiny-1B"
    for kind in ("qwen2_5_vl", "qwen2"):
        write(repository / "refs/main", OLD)
        write(repository / "snapshots" / OLD / "config.json", json.dumps({"model_type": kind}))
        for look in (hub.try_model, with_model):
            server.asked.clear()
            if kind == "qwen2":
                look(config)
                continue
            with pytest.raises(ConfigError, match=f"{named} with the vision model in model.path="):
                look(config)
            assert not server.asked


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_a_repository_is_downloaded_once_and_only_what_is_needed(
    server: Hub, tmp_path: Path
) -> None:
    config, said = with_model(asking())
    model = Path(config.model.path)
    assert model == tmp_path / "cache" / "models--org--Tiny-1B" / "snapshots" / OLD
    assert sorted(path.name for path in model.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer_config.json",
    ]
    assert (model / "model.safetensors").read_bytes() == WEIGHTS
    assert (
        f"downloading {NAME} at commit aaaaaaaa, 3 files, 0.0 GiB" in said
        and "the same command goes on" in said
    )
    server.asked.clear()
    assert with_model(asking()) == (config, "")
    assert not server.asked, "the cache has it"


def test_a_download_that_broke_off_goes_on(server: Hub, tmp_path: Path) -> None:
    server.stops_at = 11_000_000
    repository = Repository(name=NAME, commit=None)
    partial = tmp_path / "cache" / "models--org--Tiny-1B" / "blobs" / f"{oid(WEIGHTS)}.partial"
    with hub.asked_once(repository) as (answer, download):
        threading.Thread(target=download, daemon=True).start()
        while not partial.exists() or partial.stat().st_size < PIECE_BYTES:
            time.sleep(0.01)
    server.stops_at = None
    server.released.set()
    assert hub.find(repository) is None, "it is not whole"
    assert answer.n_bytes > len(WEIGHTS) > 6 * hub.look(repository).n_bytes, (
        "what there is left to download"
    )
    server.asked.clear()
    config, _ = with_model(asking())
    assert (Path(config.model.path) / "model.safetensors").read_bytes() == WEIGHTS
    gets = [
        asked for asked in server.asked if asked.startswith("GET") and "model.safetensors" in asked
    ]
    assert gets == [f"GET /{NAME}/resolve/{OLD}/model.safetensors bytes={PIECE_BYTES}-"]
    assert not partial.exists()


def test_a_file_that_was_damaged_on_the_way_is_not_used(server: Hub, tmp_path: Path) -> None:
    blobs = tmp_path / "cache" / "models--org--Tiny-1B" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{oid(WEIGHTS)}.partial").write_bytes(b"wrong" * 100)
    with pytest.raises(
        ConfigError, match="damaged on the way; the same command downloads it again"
    ):
        with_model(asking())
    assert not list(blobs.glob("*.partial"))


def test_a_server_cannot_name_a_file_outside_of_the_cache(server: Hub, tmp_path: Path) -> None:
    """The attack: a mirror whose ETag was a path wrote a file of the user."""
    server.etag = "../../../../home/.ssh/authorized_keys"
    with pytest.raises(ConfigError, match=r"names a file, a content or a commit '\.\./\.\./"):
        with_model(asking())
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("at", ["sha", "missing", "digest"])
@pytest.mark.parametrize("path", ["{home}/.profile", "../../../../home/.profile"])
def test_no_other_name_of_a_server_leads_out_of_the_cache(
    at: str, path: str, server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: a dry run wrote a line of the mirror's choice into ~/.profile."""
    home = tmp_path / "home"
    home.mkdir()
    (home / ".profile").write_text("mine")
    monkeypatch.delenv("HF_HUB_DISABLE_XET")
    setattr(server, at, path.format(home=home))
    refused = "is no directory here|names a file, a content or a commit"
    with pytest.raises(ConfigError, match=refused):
        with_model(asking())
    missing = hub.try_model(asking())[1]
    assert any("names a file, a content or a commit" in line for line in missing) or at == "digest"
    assert {one.name: one.read_text() for one in home.iterdir()} == {".profile": "mine"}
    assert hub.find(Repository(name=NAME, commit=None)) is None


def test_a_commit_in_the_cache_that_is_a_path_is_not_followed(server: Hub, tmp_path: Path) -> None:
    """The attack: an earlier mirror had written it, and a run began with a neighbour's model."""
    config, _ = with_model(asking())
    theirs = tmp_path / "theirs" / "snapshots" / OLD
    shutil.copytree(config.model.path, theirs)
    repository = Repository(name=NAME, commit=None)
    assert hub.find(repository) == Path(config.model.path)
    (Path(config.model.path).parents[1] / "refs" / "main").write_text(str(theirs))
    assert hub.find(repository) is None


@pytest.mark.parametrize("size", [int("9" * 400), -1], ids=["huge", "negative"])
def test_a_size_that_no_file_has_is_one_line(size: int, server: Hub) -> None:
    server.size = size
    with pytest.raises(ConfigError, match="the server says that a file has"):
        with_model(asking())


def test_the_process_that_asks_the_hub_writes_into_its_cache_only(tmp_path: Path) -> None:
    """Also by a name that is not checked."""
    program = """
import sys
from pathlib import Path
from driver.hub_process import _write_below_only

cache = Path(sys.argv[1]) / "cache"
_write_below_only(cache, repository=cache / "models--a--b")
(cache / "models--a--b").mkdir()
(cache / "models--a--b" / "x").write_text("x")
(cache / "models--a--b" / "x").rename(cache / "models--a--b" / "y")
Path("/dev/null").write_text("x")
for attack in (
    lambda: (cache.parent / "mine").write_text("theirs"),
    lambda: (cache.parent / "mine").unlink(),
    lambda: (cache.parent / "new").mkdir(),
    lambda: (cache.parent / "link").symlink_to("mine"),
    lambda: (cache / "models--a--b" / "y").rename(cache.parent / "mine"),
):
    try:
        attack()
    except PermissionError:
        continue
    raise SystemExit("it was written")
"""
    (tmp_path / "mine").write_text("mine")
    environment = {**os.environ, "HF_XET_CACHE": str(tmp_path / "xet")}
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if landlock.abi() == 0:
        pytest.skip("this kernel has no Landlock")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mine").read_text() == "mine"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["cache", "mine", "xet"]


EVIL = "\x1b]0;theirs\x07\x1b[31m"


def test_no_word_of_a_server_reaches_the_terminal(
    server: Hub, capfd: pytest.CaptureFixture[str]
) -> None:
    """The attack: huggingface_hub logs what a header says, and shows the name that one gives."""
    server.headers = {
        "X-HF-Warning": f"t; {EVIL}",
        "Content-Disposition": f'attachment; filename="{EVIL}";',
    }
    with_model(asking())
    said = capfd.readouterr()
    assert "theirs" in said.err and "\x1b" not in said.out + said.err


def test_a_name_that_is_not_printable_is_refused(server: Hub) -> None:
    server.name = f"{EVIL}.json"
    with pytest.raises(ConfigError, match=r"the server names a file, .* no plain name") as caught:
        with_model(asking())
    assert "\x1b" not in str(caught.value)


def test_a_file_ends_at_the_largest_size_that_was_said(server: Hub, tmp_path: Path) -> None:
    """The attack: three megabytes were said, and the disk was full."""
    server.extra_bytes = 200 << 20
    with pytest.raises(ConfigError, match="File too large"):
        with_model(asking())
    taken = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert taken <= LEAST_FILE_BYTES + (1 << 20)


def test_an_answer_of_any_size_takes_a_bounded_part_of_the_memory(server: Hub) -> None:
    server.padding = 500 << 20
    program = """
import json, sys
from store.untrusted import memory_limit

memory_limit.allowed_bytes = lambda: 250 << 20
from driver import hub_process

hub_process.main(hub_process.Request(**json.loads(sys.argv[1])))
"""
    request = json.dumps(asdict(hub._request(Repository(name=NAME, commit=None))))
    command = [sys.executable, "-c", program, request]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True)
    server.padding = 0
    assert "MemoryError" in json.loads(done.stdout)["fault"], done.stderr
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True)
    assert not json.loads(done.stdout)["fault"], done.stderr


def test_a_transfer_cache_that_cannot_be_made_is_not_needed(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_XET_CACHE", "/proc/none/xet")
    config, _ = with_model(asking())
    assert Path(config.model.path).is_dir()


def test_a_partial_file_that_is_too_long_is_begun_anew(server: Hub, tmp_path: Path) -> None:
    blobs = tmp_path / "cache" / "models--org--Tiny-1B" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{oid(WEIGHTS)}.partial").write_bytes(WEIGHTS + b"more")
    config, _ = with_model(asking())
    assert (Path(config.model.path) / "model.safetensors").read_bytes() == WEIGHTS


def test_a_download_that_waited_for_another_goes_on_behind_its_bytes(
    server: Hub, tmp_path: Path
) -> None:
    """The other one is killed while it holds the lock: what it wrote until then is not fetched
    again.
    """
    waits = f"""
import fcntl, pathlib
from driver import hub_process, model_download as hub
partial = pathlib.Path({str(tmp_path)!r}, "cache/models--org--Tiny-1B/blobs/{oid(WEIGHTS)}.partial")
fcntl.flock = lambda *_: partial.write_bytes(pathlib.Path({str(tmp_path)!r}, "first").read_bytes())
hub_process.fetch("model.safetensors", hub._request(hub.Repository(name={NAME!r}, commit={OLD!r})))
"""
    (tmp_path / "first").write_bytes(WEIGHTS[:1000])
    subprocess.run([sys.executable, "-c", waits], cwd=ROOT, check=True)
    assert server.asked[-1] == f"GET /{NAME}/resolve/{OLD}/model.safetensors bytes=1000-"
    (blob,) = (tmp_path / "cache" / "models--org--Tiny-1B" / "blobs").iterdir()
    assert blob.read_bytes() == WEIGHTS


def test_ctrl_c_is_not_for_the_process_that_talks_to_the_hub(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[str]] = []
    begin = subprocess.Popen

    def noted(*command: Any, **options: Any) -> subprocess.Popen[str]:
        started.append(begin(*command, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    with hub.asked_once(Repository(name=NAME, commit=None)):
        (process,) = started
        assert os.getsid(process.pid) == process.pid, "a terminal sends it nothing"
    assert process.returncode is not None


@pytest.mark.parametrize("path", ["mine/my--model", "mine/my..model"])
def test_a_name_that_the_hub_cannot_have_is_refused_in_a_line(path: str, server: Hub) -> None:
    with pytest.raises(
        ConfigError, match="is no directory here, and the Hugging Face Hub refuses it"
    ):
        with_model(Config(run_dir="run", model=ModelConfig(path=path)))


@pytest.mark.parametrize(
    "index",
    [
        "[" * 100_000,
        "[1]",
        '{"weight_map": 3}',
        '{"weight_map": {"a": ["x"]}}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "/etc/passwd"}}',
        '{"weight_map": {"a": "../model.safetensors"}}',
        '{"weight_map": {"a": ""}}',
        '{"weight_map": {"a": "*.safetensors"}}',
        '{"weight_map": {"a": "**"}}',
        '{"weight_map": {"a": "a\\u0000.safetensors"}}',
        '{"weight_map": {"a": "a\\n.safetensors"}}',
        '{"weight_map": {"a": "' + "a" * 5000 + '.safetensors"}}',
        '{"weight_map": {"a": "config.json"}}',
    ],
    ids=[
        "deep",
        "list",
        "number",
        "list for a name",
        "number for a name",
        "absolute",
        "beside",
        "empty",
        "pattern",
        "all",
        "zero byte",
        "line feed",
        "long",
        "no weights",
    ],
)
def test_an_index_that_names_no_files_is_said(tmp_path: Path, index: str) -> None:
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    assert hub.lacks(tmp_path) is None
    (tmp_path / "model.safetensors.index.json").write_text(index)
    lacked = hub.lacks(tmp_path) or ""
    assert lacked.startswith("a readable model.safetensors.index.json (")
    assert "\n" not in lacked and len(lacked) < 300


def test_a_run_goes_on_with_the_commit_it_began_with(server: Hub, tmp_path: Path) -> None:
    begun, _ = with_model(asking())
    layout = make_or_open_run(begun)
    server.commit = NEW
    shutil.rmtree(tmp_path / "cache")
    again, _ = with_model(asking())
    assert again == begun and hub.lacks(Path(again.model.path)) is None
    assert configs.from_yaml(layout.info.config_yaml).model.path == again.model.path
    # --resume has the recorded path, and finds no such directory where the cache has lost it
    assert hub.named(begun.model.path.replace(str(tmp_path), "/elsewhere")) == Repository(
        name=NAME, commit=OLD
    )
    assert hub.look(Repository(name=NAME, commit=None)).commit == NEW, "a new run takes the newest"


def test_a_directory_wins(server: Hub, tmp_path: Path) -> None:
    (tmp_path / "org" / "Tiny-1B").mkdir(parents=True)
    assert with_model(asking()) == (asking(), "")
    assert not server.asked


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("Qwen/Qwen2.5-1.5B-Instruct", ("Qwen/Qwen2.5-1.5B-Instruct", None)),
        (f"/home/me/hub/models--a-b--c--d/snapshots/{OLD}", ("a-b/c--d", OLD)),
        *(
            (path, None)
            for path in (
                "",
                "gpt2",
                "/models/a",
                "./a/b",
                "../a",
                "a/b/c",
                "~/a",
                "models/a",
                "runs/a",
            )
        ),
    ],
)
def test_names_of_repositories(path: str, expected: tuple[str, str | None] | None) -> None:
    repository = hub.named(path)
    assert (repository and (repository.name, repository.commit)) == expected


def test_offline_is_one_line_that_says_how_to_get_the_model(
    server: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    how = (
        f"hf download {NAME} --local-dir models/Tiny-1B`, bring the directory here, and give "
        "model.path=models/Tiny-1B"
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["train", KEY_ROOM, f"model.path={NAME}", "run_dir=run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"error: model.path='{NAME}' is not downloaded and the Hugging Face Hub cannot be reached "
        "(Offline"
    )
    assert how in line and not Path("run").exists()
    assert main(["train", KEY_ROOM, f"model.path={NAME}", "run_dir=run", "--dry-run"]) == 0
    assert how in capsys.readouterr().out


def test_a_dry_run_lists_what_is_missing(
    server: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [KEY_ROOM, "--dry-run", "run_dir=run"]

    def said(*overrides: str) -> str:
        assert main(["train", *asked, *overrides]) == 0
        return capsys.readouterr().out

    shown = said(f"model.path={NAME}")
    assert (
        f"model.path={NAME} is not downloaded; a start downloads it (3 files, 0.0 GiB"
        in shown.partition("missing here:")[2]
    )
    assert not any("resolve" in asked and asked.startswith("GET") for asked in server.asked), (
        "nothing is downloaded"
    )
    with_model(asking())
    assert said(f"model.path={NAME}").endswith("nothing is missing here\n")
    assert "there is no such directory here" in said("model.path=/nowhere/Tiny-1B")
    assert (
        "no folder; docs/webshop.md"
        in said("env.name=webshop", f"env.options={WEBSHOP}").partition("missing here:")[2]
    )
    assert "checkpoints  3 x 11.2 GiB" in said("model.path=/nowhere/Tiny-1B")
    assert (
        "free and the run needs"
        in said("model.path=/nowhere/Tiny-900000B").partition("missing here:")[2]
    )


WEBSHOP = (
    "{data: x, catalogue: small, instructions: synthetic, heldout: test, train_tasks: 0, "
    "heldout_tasks: 0, seed: 0, "
    "observation: page}"
)


def test_a_repository_that_is_not_there_is_refused_also_by_a_dry_run(
    server: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    for more in ([], ["--dry-run"]):
        assert main(["train", KEY_ROOM, "model.path=mine/Tyni-1B", "run_dir=run", *more]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert (
            "model.path='mine/Tyni-1B' is no directory here, and the Hugging Face Hub refuses it"
            in line
        )


def test_a_repository_without_weights_that_we_read_is_refused(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(FILES, "model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks \*\.safetensors"):
        with_model(asking())


def test_a_disk_that_is_too_small_is_named_before_the_download(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr("driver.preflight.shutil.disk_usage", lambda path: full)
    with pytest.raises(
        ConfigError,
        match=r"has 0\.\d MiB free and the download of the model needs 1\d\.\d MiB; .* set HF_HUB",
    ):
        with_model(asking())
    assert not any("resolve" in asked and asked.startswith("GET") for asked in server.asked)


@pytest.mark.parametrize("disks_differ", [False, True])
def test_a_download_and_a_run_that_fit_one_disk_only_one_by_one_are_named(
    server: Hub,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    disks_differ: bool,
) -> None:
    """The cache and the run directory are on one disk. A disk of its own would hold each of
    them.
    """
    config = configs.load(KEY_ROOM, [f"model.path={NAME}"])
    run_bytes = int(configs.disk_bytes(config))
    enough = shutil.disk_usage("/")._replace(free=run_bytes + len(WEIGHTS) // 2)
    monkeypatch.setattr("driver.preflight.shutil.disk_usage", lambda path: enough)
    if disks_differ:
        monkeypatch.setattr("driver.preflight._device", lambda path: hash(path))
    assert main(["train", KEY_ROOM, "--dry-run", "run_dir=run", f"model.path={NAME}"]) == 0
    missing = capsys.readouterr().out.partition("missing here:")[2]
    fault = re.search(r"the disk of run_dir=run and .* has .* free and the run needs .*", missing)
    assert (fault is None) == disks_differ
    if fault:
        assert re.search(r" and the download of the model needs 1\d\.\d MiB; free some", fault[0])


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem
)
def test_a_shipped_config_names_a_repository_or_no_model(path: Path) -> None:
    named = configs.load(path).model.path
    assert not named or hub.named(named) is not None


def test_a_package_that_is_not_installed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envs.registry.find_spec", lambda name: None)
    config = configs.load(ROOT / "configs" / "alfworld_cpu.yaml")
    missing = try_tasks(config, Console(file=io.StringIO()))
    assert (
        "env.name=alfworld needs alfworld and fast_downward: pip install -e '.[alfworld]'"
        in missing
    )
