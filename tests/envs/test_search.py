"""Question answering with searches: replies, exact match, one episode, options."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.prompting.action_parser import parse_action
from actors.prompting.template import TEMPLATES
from envs import environment_class
from envs.search.corpus import bm25_corpus, read_passages
from envs.search.world import is_match, normalise, read_reply
from tests.support.search_samples import COMMON, CORPUS, LOCAL, a_task, remote, write_lines

Local = environment_class("search_local")
Remote = environment_class("search")
SEARCH, ANSWER = "<search>{}</search>", "<answer>{}</answer>"


@pytest.mark.parametrize(
    ("answer", "golden", "hits"),
    [
        ("Aldmoor", ["Aldmoor"], True),
        ("  aLDmoor\n", ["Aldmoor"], True),
        ("Aldmoor is it", ["Aldmoor"], False),  # the whole answer, not a part
        ("", ["Aldmoor"], False),
        # articles: words of their own, wherever they are
        ("the Beatles", ["Beatles"], True),
        ("Beatles", ["The Beatles"], True),
        ("an apple and a pear", ["apple and pear"], True),
        ("theatre", ["atre"], False),
        ("Vitamin A", ["vitamin"], True),  # so it is in all of these benchmarks
        # punctuation goes before articles and leaves no space
        ("U.S.A.", ["usa"], True),
        ("rock-and-roll", ["rockandroll"], True),
        ("rock and roll", ["rock-and-roll"], False),
        ("(1,000)", ["1000"], True),
        ("a-ha", ["aha"], True),
        ("A. Milne", ["Milne"], True),  # the initial becomes an article
        ("$5", ["5"], True),
        # unicode: case folds letter by letter, accents and typographic signs stay
        ("BEYONCÉ", ["Beyoncé"], True),
        ("Beyonce", ["Beyoncé"], False),
        ("Beyonce\u0301", ["Beyoncé"], False),  # composed and decomposed are different texts
        ("Straße", ["STRASSE"], False),
        ("Ivo\u00a0Castelan", ["Ivo Castelan"], True),  # every kind of space is one
        ("O’Hara", ["O'Hara"], False),
        ("東京", ["東京"], True),
        # several golden answers: one is enough
        ("Tarn", ["River Tarn", "Tarn", "the Tarn River"], True),
        ("Wend", ["River Tarn", "Tarn"], False),
        ("anything", [], False),
    ],
)
def test_exact_match(answer: str, golden: list[str], hits: bool) -> None:
    assert is_match(answer, golden) is hits


@given(st.lists(st.text("bcdéñ12", min_size=1), min_size=1), st.integers())
def test_case_articles_punctuation_and_spaces_never_matter(words: list[str], seed: int) -> None:
    draw = random.Random(seed)
    dressed = " ".join(
        draw.choice(("", "the ", "A ", "an, "))
        + draw.choice((word, word.title()))
        + draw.choice(("", ".", "!?", " ' "))
        for word in words
    )
    assert is_match(f" {dressed}\t", ["something else", " ".join(words)])
    assert normalise(normalise(dressed)) == normalise(dressed)


@pytest.mark.parametrize(
    ("reply", "kind", "text", "is_valid"),
    [
        ("<search>capital of Vesk</search>", "search", "capital of Vesk", True),
        ("<think>hm</think>\n<answer> Aldmoor\n</answer>", "answer", "Aldmoor", True),
        ("<SEARCH>Vesk</Search>", "search", "Vesk", True),
        ("<search></search>", "search", "", True),
        ("<search>two\nlines</search> and more talk", "search", "two\nlines", True),
        ("Aldmoor", "", "", False),
        ("", "", "", False),
        ("<search>Vesk", "", "", False),
        # both kinds: the search counts, also behind the answer
        ("<search>Vesk</search><answer>Aldmoor</answer>", "search", "Vesk", False),
        ("<answer>Aldmoor</answer><search>Vesk</search>", "search", "Vesk", False),
        ("<search>Vesk <answer>Aldmoor</answer>", "answer", "Aldmoor", False),
        # more than one: the first counts
        ("<search>one</search><search>two</search>", "search", "one", False),
        ("<answer>one</answer><answer>two</answer>", "answer", "one", False),
        # nothing behind the first </search> is looked at
        ("</search><answer>Aldmoor</answer>", "", "", False),
        ("</answer><answer>Aldmoor</answer>", "", "", False),
        ("I could <search> but <answer>Aldmoor</answer>", "answer", "Aldmoor", False),
    ],
)
def test_reading_a_reply(reply: str, kind: str, text: str, is_valid: bool) -> None:
    read = read_reply(reply)
    assert (read.kind, read.text, read.is_valid) == (kind, text, is_valid)


@given(st.text().filter(lambda text: "<" not in text), st.sampled_from(["search", "answer"]))
def test_a_block_alone_is_what_it_says(text: str, kind: str) -> None:
    read = read_reply(f"<{kind}>{text}</{kind}>")
    assert (read.kind, read.text, read.is_valid) == (kind, text.strip(), True)


def test_an_episode_by_hand() -> None:
    env = Local(LOCAL)
    first = env.reset(a_task("What is the capital of Vesk?", ["Aldmoor"]))
    assert (first.text, first.objective, first.anchor) == (
        "",
        "What is the capital of Vesk?",
        "What is the capital of Vesk?",
    )
    assert first.actions is None

    searched = env.step(SEARCH.format("Who was Pell Harrin?"))
    seen = searched.observation
    assert seen.text.startswith(
        '<information>Doc 1(Title: "Pell Harrin") Pell Harrin was a climber and mapmaker, '
        "born in Little"
    )
    assert seen.text.endswith("\n</information>")
    assert seen.text.count("Doc ") == 2  # topk
    assert (seen.anchor, seen.objective) == (None, first.objective)
    assert (
        searched.reward,
        searched.terminated,
        searched.truncated,
        searched.won,
        searched.valid,
    ) == (
        0,
        False,
        False,
        False,
        True,
    )

    asked = env.step(SEARCH.format("Aldmoor"))  # the right words, but no answer
    assert (asked.reward, asked.won, asked.terminated) == (0, False, False)

    babbled = env.step("Let me think.")
    assert (babbled.observation.text, babbled.valid, babbled.terminated) == ("", False, False)
    both = env.step(SEARCH.format("zzz") + ANSWER.format("Aldmoor"))
    assert (both.observation.text, both.valid, both.terminated) == (
        "<information></information>",
        False,
        False,
    )

    answered = env.step("<think>so</think>" + ANSWER.format("the Aldmoor!"))
    assert (answered.reward, answered.terminated, answered.won, answered.valid) == (
        1,
        True,
        True,
        True,
    )
    with pytest.raises(ValueError, match="the episode is over"):
        env.step(SEARCH.format("more"))

    env.reset(a_task("What is the capital of Vesk?", ["Aldmoor"]))
    wrong = env.step(ANSWER.format("Kells"))
    assert (wrong.reward, wrong.terminated, wrong.won, wrong.valid) == (0, True, False, True)


def test_what_a_scripted_policy_chooses_from() -> None:
    env = Local({**LOCAL, "list_actions": True})
    first = env.reset(a_task("Who was Pell Harrin?", ["a climber"]))
    assert first.actions == ("<search>Who was Pell Harrin?</search>",)
    seen = env.step(first.actions[0]).observation
    assert seen.actions is not None
    assert seen.actions[:2] == (
        "<search>Who was Pell Harrin?</search>",
        "<answer>Pell Harrin</answer>",
    )
    assert all(read_reply(action).is_valid for action in seen.actions)


def test_the_tasks_of_the_example() -> None:
    train, heldout = Local.tasks("train", LOCAL), Local.tasks("heldout", LOCAL)
    assert [task.id for task in train] == [f"countries-train_{n}" for n in range(16)]
    assert [task.id for task in heldout] == [f"countries-test_{n}" for n in range(8)]
    assert {task.data["type"] for task in train} == {"countries"}
    assert [(task.env_name, task.split) for task in heldout] == [("search_local", "heldout")] * 8
    assert {task.data["corpus"] for task in train} == {str(CORPUS)}
    asked = Remote.tasks("train", remote("http://h/retrieve"))
    assert [(task.id, {**task.data, "corpus": str(CORPUS)}) for task in asked] == [
        (task.id, task.data) for task in train
    ]
    with pytest.raises(ValueError, match="split 'test' is not one of"):
        Local.tasks("test", LOCAL)


def test_every_question_of_the_example_is_answered_by_its_corpus() -> None:
    corpus = [normalise(passage.contents) for passage in read_passages(CORPUS)]
    for task in (*Local.tasks("train", LOCAL), *Local.tasks("heldout", LOCAL)):
        answers = [
            normalise(answer) for answer in task.data["golden_answers"].strip('[]"').split('", "')
        ]
        assert any(answer in text for answer in answers for text in corpus), task


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"topk": 0}, "topk=0 must be a whole number, at least 1"),
        ({"heldout_limit": -1}, "heldout_limit=-1 must be a whole number, at least 0"),
        ({"topk": True}, "topk=True must be a whole number"),
        ({"topk": "3"}, "topk='3' must be a whole number"),
        ({"questions": "q.jsonl"}, "questions='q.jsonl' must be of type list"),
        ({"train_sources": []}, "train_sources=.. must be of type list, and not empty"),
        ({"corpus": ""}, "corpus='' must be of type str, and not empty"),
        ({"list_actions": 1}, "list_actions=1 must be of type bool"),
        ({"retriever": "http://h"}, "options missing or unknown: retriever; it takes .'corpus'"),
        ({"corpus": "no_such.jsonl"}, "no corpus at no_such.jsonl"),
    ],
)
def test_options_are_refused_in_one_line(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as refusal:
        Local.tasks("train", {**LOCAL, **changes})
    assert "\n" not in str(refusal.value)
    with pytest.raises(ValueError, match="missing or unknown: retriever"):
        Remote(COMMON)
    with pytest.raises(
        ValueError,
        match="retriever='localhost:8000' must be a URL like http://127.0.0.1:8000/retrieve",
    ):
        Remote.tasks("train", remote("localhost:8000"))


def test_bm25_by_hand(tmp_path) -> None:
    rows = [
        {"id": 7, "title": "Tarn", "text": "a river"},
        {"id": 8, "contents": '"Garrow"\nthe mountains of Vesk'},
        {"id": 9, "title": "Wend", "text": "a river"},
    ]
    library = bm25_corpus(write_lines(tmp_path / "corpus.jsonl", rows))
    assert len(library) == 3

    def found(query: str, topk: int = 3) -> list[str]:
        return [hit.passage.id for hit in library.search([query], topk)[0]]

    assert found("tarn") == ["7"]  # titles count, case does not
    assert found("MOUNTAIN?") == ["8"]  # stems
    assert found("rivers") == ["7", "9"]  # equal scores: the order of the corpus
    assert found("wend river") == ["9", "7"]
    assert found("rivers", topk=1) == ["7"]
    assert found('title:tarn AND NOT (river* "wend" -vesk)^2 ~ \\') != []  # no query language
    assert found("?!") == found("") == found("zebra") == []
    assert [
        [hit.passage.id for hit in hits] for hits in library.search(["tarn", "", "wend"], 1)
    ] == [["7"], [], ["9"]]
    (hit,) = library.search(["mountain"], 1)[0]
    assert hit.passage.contents == '"Garrow"\nthe mountains of Vesk'
    assert hit.score > 0


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is empty"),
        (
            '{"id": 1, "text": "x"}\n',
            r"line 1 has \['id', 'text'\]; it must have id and contents, or id, title and text",
        ),
        (
            '{"id": 1, "contents": "x"}\n{"id": "1", "contents": "y"}\n',
            "line 2: id '1' is there twice",
        ),
        ('{"id": 1, "contents": "x"}\nnot json\n', "line 2 is not a JSON object: 'not json"),
        ("[" * 100_000, r"line 1 is not a JSON object: '\[\[\["),
    ],
)
def test_a_corpus_is_refused_in_one_line(tmp_path, text: str, complaint: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint) as refusal:
        read_passages(path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("parser", ["tags", "upstream"])
@pytest.mark.parametrize(
    "said",
    [
        "<think>hm</think> <search> capital of Vesk </search>",
        "<ANSWER>Aldmoor</ANSWER> That is it.",
        "<search>one</search><search>two</search>",
        "<answer>Aldmoor</answer><search>Vesk</search>",
        "Aldmoor",
    ],
)
def test_a_reply_is_the_same_with_and_without_the_prompts_parser(said: str, parser: str) -> None:
    parsed = parse_action(said, template=TEMPLATES["search"], parser=parser, opening="")
    after, direct = read_reply(parsed.action), read_reply(said)
    assert (after.kind, after.text) == (direct.kind, direct.text)
    assert (after.is_valid and parsed.well_formed) == direct.is_valid


def test_a_task_names_no_corpus(tmp_path: Path) -> None:
    """The attack: a task that was not listed here has the environment read a file of somebody
    else's choice.
    """
    secret = write_lines(
        tmp_path / "secret.jsonl",
        [{"id": "0", "contents": '"Password"\nthe password is swordfish'}],
    )
    task = a_task("Who?", ["me"])
    env = environment_class("search_local")(LOCAL)
    env.reset(replace(task, data={**task.data, "corpus": str(secret)}))
    assert "swordfish" not in env.step("<search>password swordfish</search>").observation.text
