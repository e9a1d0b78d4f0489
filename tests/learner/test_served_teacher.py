"""A teacher behind a server: it teaches what the same model teaches in the process."""

from __future__ import annotations

import gzip
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import store
from cli.__main__ import main
from configs import LearnerConfig, LossConfig, ModelConfig
from learner import ServedTeacher
from learner.data import served_teacher
from learner.data.served_teacher import TeacherError
from learner.training.engine import Engine
from learner.training.step_metrics import UpdateStats
from model_server import MAX_ANSWER_BYTES
from tests.support.chat_server import Answer, chat_server
from tests.support.engine_samples import CUT, cut, history_rows, make_base
from tests.support.fast_directory import fast_directory
from tests.support.replay_samples import config_of, train
from tests.support.store_samples import make_step
from tests.support.teacher_server import echoed, plain_logprobs, teacher_server

START_TIMEOUT_S = 240.0  # only for what hangs


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("policy") / "base")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("teacher") / "base", seed=1)


def with_an_empty_response(rows: pa.Table) -> pa.Table:
    for name in ("response_ids", "response_logprobs"):
        index, column = rows.column_names.index(name), rows[name]
        last = pa.array([*column.to_pylist()[:-1], []], column.type)
        rows = rows.set_column(index, name, last)
    return rows


def assert_judged(rows: pa.Table, *, by: Path) -> None:
    expected = plain_logprobs(by, rows)
    for row, found in enumerate(rows["teacher_logprob"].to_pylist()):
        assert found == pytest.approx(expected[row], abs=1e-5)


def update(base: Path, rows: pa.Table, *, teacher: str) -> UpdateStats:
    engine = Engine(
        model_path=base,
        model=ModelConfig(),
        learner=LearnerConfig(learning_rate=1e-2),
        loss=LossConfig(policy="distillation", teacher=teacher),
        temperature=1.0,
        seed=0,
    )
    try:
        (stats,) = engine.train([cut(rows, CUT, merge_steps=True)])
    finally:
        engine.close()
    return stats


def test_an_update_is_that_of_the_teacher_in_the_process(base: Path, teacher: Path) -> None:
    """Steps that continue one another are one request, and nothing of the environment is sent."""
    rows = with_an_empty_response(history_rows())
    with pytest.MonkeyPatch.context() as patch, teacher_server(teacher) as server:
        for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
            patch.setenv(name, "secret")
        patch.setenv("OPENAI_CUSTOM_HEADERS", "X-Other: secret\nauthorization: secret")
        judged = ServedTeacher(server.url).with_logprobs(rows)
    assert_judged(judged, by=teacher)
    assert len(server.asked) == 5 < len(rows) and server.keys == {""}
    assert len(server.headers) == 6 and "secret" not in "".join(server.headers)
    here, there = (
        asdict(update(base, table, teacher=of))
        for table, of in ((rows, str(teacher)), (judged, server.url))
    )
    for stats in (here, there):
        stats |= stats.pop("tokens")
        assert stats.pop("bad_rows") == ()
    assert there == pytest.approx(here, rel=1e-5, abs=1e-5)
    assert abs(here["loss"]) > 1e-3


def test_a_run_learns_from_it_and_is_replayed(
    teacher: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = []
    monkeypatch.setattr("tests.support.replay_samples.make_step", partial(make_step, images=()))
    with fast_directory() as directory, teacher_server(teacher) as server:
        for name, of in (("here", str(teacher)), ("there", server.url)):
            config = config_of(directory / name, steps=2)
            loss = replace(config.loss, policy="distillation", teacher=of, proximal="none")
            train(replace(config, loss=loss))
            with store.open_run(directory / name) as reader:
                found = reader.sql(
                    "SELECT value FROM metrics WHERE name = 'loss/loss' ORDER BY learner_step"
                )
            losses.append(found["value"].to_pylist())
        run = directory / "there"
        base = f"model.path={run}/base/policy"
        assert main(["replay", str(run), "1", base, "--to", "2"]) == 0, capsys.readouterr()
    assert "2 of 2 learner steps identical" in capsys.readouterr().out
    assert losses[1] == pytest.approx(losses[0], abs=1e-4) and losses[0][0] != losses[0][1]


NO_ECHO = "does not echo tokens with their log-probabilities"
NOT_GOOD = "log-probabilities for 3 tokens, or one that is not from -10000 to 0"
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (echoed(None), NO_ECHO),
        (echoed([None]), f"gave 0 {NOT_GOOD}"),
        (echoed([None, None, -1.0]), NO_ECHO),
        (echoed([None, "-1", "-2"]), NO_ECHO),
        (echoed("n12"), NO_ECHO),
        (echoed({"1": -1.0}), NO_ECHO),
        (echoed([None, [-1.0, -2.0], [-3.0, -4.0]]), NO_ECHO),
        (echoed([None, True, False]), NO_ECHO),
        (echoed([None, 1e308, -1e308]), f"gave 2 {NOT_GOOD}"),
        (echoed([None, -1.0, -1.7e308]), f"gave 2 {NOT_GOOD}"),
        (echoed([None, 0.5, -1.0]), f"gave 2 {NOT_GOOD}"),
        (echoed([None, float("nan"), -1.0]), f"gave 2 {NOT_GOOD}"),
        (echoed([None, -1.0, -(10**400)]), f"gave 2 {NOT_GOOD}"),
        (echoed([None, -1.0, 10**400]), f"gave 2 {NOT_GOOD}"),
        ((200, {"choices": []}), NO_ECHO),
        ((200, {"choices": "abc"}), NO_ECHO),
        ((200, "<html>"), NO_ECHO),
        ((200, "null"), NO_ECHO),
        ((200, "[1]"), NO_ECHO),
        ((200, "{"), NO_ECHO),
        ((200, b'{"choices": "\xff"}'), NO_ECHO),
        ((200, f'{{"choices": {DEEP}}}'), NO_ECHO),
        ((200, f'{{"choices": {"9" * 5000}}}'), NO_ECHO),
        ((400, {"error": {"message": "no\nlogprobs"}}), "refused tokens: .*logprobs"),
        ((400, DEEP), "refused tokens: Error code: 400"),
        ((307, "", {"Location": "http://[::1"}), "refused tokens: .*307"),
        ((200, "", {"Content-Encoding": "gzip, " * 99 + "gzip"}), "tokens: .* Content-Encoding"),
    ],
)
def test_a_server_that_is_no_teacher_is_named(
    answer: Answer, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_teacher, "ATTEMPTS", 1)
    with chat_server(lambda body: answer, models=["teacher"]) as server:
        with pytest.raises(TeacherError, match=says) as error:
            ServedTeacher(server.url).logprobs([np.array([1, 2, 3])] * 2)
        assert "\n" not in str(error.value) and server.url in str(error.value)


def test_a_logarithm_rounded_above_0_and_a_whole_one_are_taken() -> None:
    with chat_server(lambda body: echoed([None, 1e-7, -2]), models=["teacher"]) as server:
        (found,) = ServedTeacher(server.url).logprobs([np.array([1, 2, 3])])
    assert found.dtype == np.float64 and found.tolist() == [1e-7, -2.0]


@pytest.mark.parametrize(
    "models",
    [
        "<h1>",
        "null",
        "[1]",
        "{",
        '{"data": 5}',
        '{"data": ["a"]}',
        '{"data": [{}]}',
        f'{{"data": [{{"id": {"9" * 5000}}}]}}',
        f'{{"data": [{{"id": {"[" * 985}{"]" * 985}}}]}}',
        DEEP,
    ],
    ids=lambda text: text[:20],
)
def test_a_server_that_lists_no_models_is_named(models: str) -> None:
    with (
        chat_server(lambda body: echoed(None), models=models) as server,
        pytest.raises(TeacherError, match="does not list its models; does the URL end in /v1"),
    ):
        ServedTeacher(server.url)


@pytest.mark.parametrize(
    ("status", "sent_as", "says"),
    [
        (200, {"Content-Encoding": "gzip"}, "has Content-Encoding gzip, and none was asked for"),
        (400, {"Content-Encoding": "gzip"}, "refused tokens"),
        # Python knows zlib as a character set of the text in an error
        (400, {"Content-Type": "text/plain; charset=zlib"}, "refused tokens"),
    ],
)
def test_a_bomb_is_not_decompressed(
    status: int, sent_as: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_teacher, "ATTEMPTS", 1)
    n_bytes = 8 * MAX_ANSWER_BYTES
    compress = gzip.compress if "Content-Encoding" in sent_as else zlib.compress
    bomb = compress(b" " * n_bytes)
    with chat_server(lambda body: (status, bomb, sent_as), models=["teacher"]) as server:
        judge = ServedTeacher(server.url)
        tracemalloc.start()
        try:
            with pytest.raises(TeacherError, match=says):
                judge.logprobs([np.array([1, 2, 3])])
            assert tracemalloc.get_traced_memory()[1] < n_bytes
        finally:
            tracemalloc.stop()


DRIPS = {
    "body": (b"HTTP/1.1 200 OK\r\nContent-Length: 10000000\r\n\r\n", b" "),
    "1xx": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "head": (b"HTTP/1.1 200 OK\r\n", b"x"),
}


def drip(connection: socket.socket, kind: str) -> None:
    """Answer one request with a few bytes every 50 ms, until the client goes."""
    first, then = DRIPS[kind]
    with suppress(OSError), connection:
        connection.recv(65536)
        connection.sendall(first)
        while True:
            connection.sendall(then)
            time.sleep(0.05)


@contextmanager
def dripping(kind: str) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    threading.Thread(target=drip, args=(connection, kind), daemon=True).start()

        threading.Thread(target=answer, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/v1"


@pytest.mark.parametrize("kind", DRIPS)
def test_an_answer_that_drips_is_given_up(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_teacher, "TIMEOUT_S", 1.0)
    monkeypatch.setattr(served_teacher, "REQUEST_TIMEOUT_S", 1.0)
    monkeypatch.setattr(served_teacher, "ATTEMPTS", 1)
    with dripping(kind) as url:
        with pytest.raises(TeacherError, match=f"{url} gave no whole answer within 1 s"):
            ServedTeacher(url)
        with monkeypatch.context() as patch:

            async def known(self: ServedTeacher) -> str:
                return "teacher"

            patch.setattr(ServedTeacher, "_find_model", known)
            judge = ServedTeacher(url)
        with pytest.raises(TeacherError, match=f"{url} gave no whole answer within 1 s"):
            judge.logprobs([np.array([1, 2, 3])])


def test_no_value_is_made_of_an_error_of_many_values() -> None:
    """The attack: the client itself read 16 MiB of JSON into objects of 500 MiB."""
    answer = gzip.compress(b"[" + b'{"":0},' * (MAX_ANSWER_BYTES // 7 - 2) + b"0]")
    with chat_server(
        lambda body: (400, answer, {"Content-Encoding": "gzip"}), models=["teacher"]
    ) as server:
        judge = ServedTeacher(server.url)
        tracemalloc.start()
        try:
            with pytest.raises(TeacherError, match="refused tokens"):
                judge.logprobs([np.array([1, 2, 3])])
            assert tracemalloc.get_traced_memory()[1] < 4 * MAX_ANSWER_BYTES
        finally:
            tracemalloc.stop()


def test_images_are_not_sent(teacher: Path) -> None:
    rows = history_rows()
    images = pa.array([[b"pixels"], *[None] * (len(rows) - 1)])
    with (
        teacher_server(teacher) as server,
        pytest.raises(TeacherError, match="is sent no images; use the teacher's directory"),
    ):
        ServedTeacher(server.url).with_logprobs(rows.append_column("images", images))


def test_a_server_must_be_there_with_the_teacher_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_teacher, "ATTEMPTS", 1)
    with pytest.raises(TeacherError, match="http://127.0.0.1:1/v1 did not answer"):
        ServedTeacher("http://127.0.0.1:1/v1")
    with (
        chat_server(lambda body: echoed(None)) as server,
        pytest.raises(TeacherError, match="serves 2 models; give it the teacher alone"),
    ):
        ServedTeacher(server.url)
    longest = "m" * served_teacher.MAX_NAME_CHARACTERS
    with chat_server(lambda body: echoed(None), models=[longest]) as server:
        ServedTeacher(server.url)
    with (
        chat_server(lambda body: echoed(None), models=[longest + "m"]) as server,
        pytest.raises(TeacherError, match="a model whose name has 4,097 characters"),
    ):
        ServedTeacher(server.url)


@pytest.mark.slow
def test_vllms_server_is_a_teacher(teacher: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", teacher]
    settings = (
        "--host 127.0.0.1 --dtype float32 --max-model-len 128 --enforce-eager --max-num-seqs 16 "
        f"--kv-cache-memory-bytes {2**27} --port"
    )
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, *settings.split(), str(port)], stdout=log, stderr=log, cwd=tmp_path
        )
    try:
        deadline_s, judge = time.monotonic() + START_TIMEOUT_S, None
        while judge is None and time.monotonic() < deadline_s and process.poll() is None:
            with suppress(TeacherError):  # it is still loading
                judge = ServedTeacher(f"http://127.0.0.1:{port}/v1")
        assert judge is not None, (tmp_path / "log").read_text()
        assert_judged(judge.with_logprobs(with_an_empty_response(history_rows())), by=teacher)
    finally:
        process.terminate()
        process.wait(START_TIMEOUT_S)
