"""Test chats of files: which tokens a learner sees, and what is refused by its place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.chat_data import FoundChats, chat_texts, chat_trajectories, read_chats
from configs import ConfigError
from learner.data.micro_batch import micro_batches
from store import to_table
from tests.support.chat_samples import encode, tokenizer
from tests.support.neighbours import Neighbour

EOS = 1
ADD = [
    {"role": "system", "content": "it is"},
    {"role": "user", "content": "low"},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "high"},
    {"role": "assistant", "content": "12"},
]
CALLED = [
    {"role": "user", "content": "guess"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "low", "arguments": '{"it": 7}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "too high"},
    {"role": "assistant", "content": "it is 7"},
]
TOOLS = [{"type": "function", "function": {"name": "low", "parameters": {"type": "object"}}}]


def lines(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def found_in(path: Path, *, template: str = "tiny", max_tokens: int = 1000) -> FoundChats:
    return chat_trajectories(
        read_chats(path), tokenizer(template), file_id="f", thinking=None, max_tokens=max_tokens
    )


def text_of(token_ids: Sequence[int], template: str = "tiny") -> str:
    return tokenizer(template).decode(token_ids, skip_special_tokens=False)


def test_each_reply_is_a_step_that_begins_with_the_tokens_before_it(tmp_path: Path) -> None:
    found = found_in(lines(tmp_path / "c.jsonl", [{"messages": ADD, "id": 5}]))
    (trajectory,) = found.trajectories
    first, second = trajectory.steps
    assert text_of(first.prompt_ids) == "<user>it is<user>low<assistant>"
    assert first.response_ids == (*encode("7"), EOS)
    assert second.prompt_ids[: len(first.prompt_ids) + 2] == first.prompt_ids + first.response_ids
    assert (
        text_of(second.prompt_ids) == "<user>it is<user>low<assistant>7<eos><user>high<assistant>"
    )
    assert second.response_ids == (*encode("12"), EOS)
    assert (trajectory.task_id, trajectory.split, trajectory.member) == ("5", "train", 0)
    assert [step.action_text for step in trajectory.steps] == ["7", "12"]
    assert [step.obs_text for step in trajectory.steps] == ["low", "high"]
    assert [step.terminated for step in trajectory.steps] == [False, True]


@pytest.mark.parametrize("template", ["tiny", "chatml", "plain"])
def test_the_learner_packs_a_chat_as_one_sequence_and_learns_the_replies(
    tmp_path: Path, template: str
) -> None:
    chat = ADD[1:]  # "plain" takes no system message
    found = found_in(lines(tmp_path / "c.jsonl", [{"messages": chat}]), template=template)
    rows = to_table(found.trajectories)
    zeros = pa.array([0.0] * len(rows))
    rows = rows.append_column("advantage", zeros)
    rows = rows.append_column("staleness", zeros.cast(pa.int64()))
    (batch,) = micro_batches(rows, micro_batch_tokens=1000, ranks=1)
    assert len(batch.bounds_Sp1) == 2
    learnt = [*encode("7"), EOS, *encode("12"), EOS]
    if template == "plain":  # which writes a space of its own into no reply
        learnt = [*encode(" 7"), EOS, *encode(" 12"), EOS]
    assert batch.response_ids_N.tolist() == learnt


def test_calls_of_tools_are_written_by_the_template(tmp_path: Path) -> None:
    path = lines(tmp_path / "c.jsonl", [{"messages": CALLED, "tools": TOOLS}])
    (trajectory,) = found_in(path, template="tooled").trajectories
    call, answer = trajectory.steps
    assert text_of(call.prompt_ids).startswith("<user>tools: low<eos>")
    assert call.action_text == '<tool_call>\n{"name": "low", "arguments": {"it": 7}}\n</tool_call>'
    assert call.response_ids[-1] == EOS
    assert text_of(answer.prompt_ids).endswith(
        "</tool_call><eos>\n<user>tool\ntoo high<eos>\n<user>assistant\n"
    )
    n = len(call.prompt_ids + call.response_ids)
    assert answer.prompt_ids[:n] == call.prompt_ids + call.response_ids


def test_parquet_has_the_same_chats_as_lines_with_lists_or_json(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"messages": ADD, "tools": None, "id": "a"},
        {"messages": CALLED, "tools": TOOLS, "id": "b"},
    ]
    wanted = found_in(lines(tmp_path / "c.jsonl", rows), template="tooled").trajectories
    nested = pa.Table.from_pylist(rows)
    texts = pa.Table.from_pylist(
        [{key: json.dumps(value) for key, value in row.items() if key != "id"} for row in rows]
    ).append_column("id", pa.array(["a", "b"]))
    for number, table in enumerate((nested, texts)):
        pq.write_table(table, tmp_path / f"{number}.parquet")
        made = found_in(tmp_path / f"{number}.parquet", template="tooled").trajectories
        for one, other in zip(made, wanted, strict=True):
            assert (one.task_id, one.traj_uid) == (other.task_id, other.traj_uid)
            for step, same in zip(one.steps, other.steps, strict=True):
                assert step.prompt_ids + step.response_ids == same.prompt_ids + same.response_ids


def test_a_chat_that_is_too_long_is_cut_before_the_reply_or_left_out(tmp_path: Path) -> None:
    path = lines(tmp_path / "c.jsonl", [{"messages": ADD}, {"messages": ADD[:3]}])
    whole = found_in(path).trajectories[0].steps
    n_first = len(whole[0].prompt_ids + whole[0].response_ids)
    n_all = len(whole[1].prompt_ids + whole[1].response_ids)
    assert found_in(path, max_tokens=n_all).n_cut == 0
    cut = found_in(path, max_tokens=n_all - 1)
    assert (cut.n_cut, cut.n_left_out) == (1, 0)
    (step,) = cut.trajectories[0].steps
    assert not step.terminated and step.response_ids == whole[0].response_ids
    none = found_in(path, max_tokens=n_first - 1)
    assert (none.trajectories, none.n_left_out) == ([], 2)


def test_the_texts_of_chats_make_a_tokenizer(tmp_path: Path) -> None:
    path = lines(tmp_path / "c.jsonl", [{"messages": CALLED, "tools": TOOLS}])
    assert list(chat_texts(path)) == [
        "guess",
        '<tool_call>{"name": "low", "arguments": {"it": 7}}</tool_call>',
        "too high",
        "it is 7",
    ]
    call = found_in(path).trajectories[0].steps[0].action_text  # by the tiny model's template
    assert call in chat_texts(path)


def test_half_a_character_in_a_chat_becomes_a_whole_one(tmp_path: Path) -> None:
    """It ended a training in a traceback, after the run's directory was made."""
    half = [dict(message) for message in ADD]
    half[1]["content"] = "low \ud83d"
    half[2]["content"] = "7 \ud83d"
    path = lines(tmp_path / "c.jsonl", [{"messages": half, "id": "\ud83d"}])
    assert list(chat_texts(path))[1:3] == ["low \ufffd", "7 \ufffd"]
    for trajectory in found_in(path).trajectories:
        assert to_table([trajectory]).num_rows == 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "c.jsonl: line 2 is no JSON"),
        ("[]", "c.jsonl: chat 2: it must be"),
        ('{"prompt": "x"}', "chat 2: messages is missing"),
        ('{"messages": []}', "chat 2: messages=[]"),
        ('{"messages": [{"role": "bot", "content": "x"}]}', "chat 2: messages[0].role='bot'"),
        ('{"messages": [{"role": "user"}]}', "messages[0]"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "chat 2 has no reply"),
        ('{"messages": "{"}', "chat 2: messages='{'"),
        (json.dumps({"messages": "[" * 100_000}), "chat 2: messages='[["),
    ],
)
def test_a_wrong_chat_is_named_by_its_place(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"messages": ADD}) + "\n" + line)
    with pytest.raises(ConfigError) as caught:
        list(read_chats(path))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_message_that_the_chat_template_refuses_is_named(tmp_path: Path) -> None:
    path = lines(tmp_path / "c.jsonl", [{"messages": ADD[1:]}, {"messages": ADD}])
    with pytest.raises(
        ConfigError, match=r"chat 2: the reply in messages\[2\].*no system messages"
    ):
        found_in(path, template="plain")
    path = lines(tmp_path / "c.jsonl", [{"messages": ADD}])
    with pytest.raises(ConfigError, match="does not show the reply behind its own prompt"):
        found_in(path, template="thinking")


def test_values_that_python_does_not_have_are_named(tmp_path: Path) -> None:
    path = tmp_path / "c.parquet"
    long_ago = pa.array([2**62], pa.timestamp("us"))
    pq.write_table(pa.table({"messages": [json.dumps(ADD)], "id": long_ago}), path)
    with pytest.raises(ConfigError, match=r"c\.parquet cannot be read as chats"):
        list(read_chats(path))
    pq.write_table(pa.table({"messages": [json.dumps(ADD)], "other": long_ago}), path)
    assert len(list(read_chats(path))) == 1, "other columns are not read"


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.parquet").write_bytes(b"no parquet")
    with pytest.raises(ConfigError, match=r"c\.parquet cannot be read as chats"):
        list(read_chats(tmp_path / "c.parquet"))


def test_a_file_without_chats_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("\n")
    with pytest.raises(ConfigError, match=r"empty\.jsonl has no chats; it needs one JSON object"):
        list(read_chats(path))


def test_a_private_file_is_not_read_through_a_link_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: the run was for everybody to read, and so was what the link led to."""
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    table = pa.Table.from_pylist([{"messages": json.dumps(ADD)}])
    pq.write_table(table, private / "chats.parquet")
    (private / "chats.jsonl").write_text(json.dumps({"messages": ADD}))
    neighbour = Neighbour(monkeypatch)
    for name in ("chats.parquet", "chats.jsonl"):
        (private / name).chmod(0o600)
        (theirs / name).symlink_to(private / name)
        neighbour.gets(theirs / name)
        assert len(list(read_chats(private / name))) == 1
        with pytest.raises(ConfigError, match="link of another user"):
            list(read_chats(theirs / name))


def test_a_file_that_grows_while_it_is_read_ends_where_it_ended(tmp_path: Path) -> None:
    """The attack: its owner wrote more as fast as it was read, and the start never ended."""
    path = tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "2+5"}, {"role": "assistant", "content": "7"}]
    row = json.dumps({"messages": messages}) + "\n"
    path.write_text(row * 3)
    n_read = 0
    for _ in read_chats(path):
        n_read += 1
        with path.open("a") as file:
            file.write(row * 1_000)
    assert n_read == 3
