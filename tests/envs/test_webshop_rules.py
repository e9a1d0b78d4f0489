"""The shop's rules by hand: pages, score, nouns, options. Needs no data."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import configs
from envs import environment_class
from envs.webshop import WebShopEnv, nouns, reward
from envs.webshop.__main__ import main as webshop_main
from envs.webshop.catalogue import Product, read
from envs.webshop.goals import Goal, Goals
from envs.webshop.pages import done_page, results_page, sub_page, visible
from envs.webshop.world import open_shop, read_action
from tests.support.webshop_samples import ALL, DEPARTMENTS, ITEMS, LAMP, choices, item, write_shop

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def options(tmp_path: Path) -> Iterator[dict[str, object]]:
    yield write_shop(tmp_path / "shop")
    open_shop.cache_clear()


def lamp(options: dict[str, object]) -> Product:
    return read(Path(str(options["data"])), "small")[0]


def test_products_are_cleaned(options: dict[str, object]) -> None:
    catalogue = read(Path(str(options["data"])), "small")
    assert [product.asin for product in catalogue] == ["B000000001", "B000000002", "B000000003"]
    first = catalogue[0]
    assert first.prices == (19.99, 27.99)
    assert first.options == {"size": ("small", "large | tall"), "color": ("dark red", "1877brown")}
    assert first.contents.endswith(
        "bright  size: small, large | tall, and color: dark red, 1877brown"
    )
    assert (catalogue[1].prices, catalogue[1].bullets, catalogue[1].query) == (
        (100.0,),
        ("One text",),
        "lamps",
    )
    assert catalogue[2].attributes == ("DUMMY_ATTR",)


def test_goals_are_all_choices_of_options_and_prices_depend_on_the_seed_alone(
    options: dict[str, object],
) -> None:
    catalogue = read(Path(str(options["data"])), "small")
    goals = [Goals(catalogue, "synthetic", seed=5)[place] for place in range(4)]
    assert {goal.options for goal in goals} == {
        (("color", color), ("size", size))
        for color in ("dark red", "1877brown")
        for size in ("small", "large | tall")
    }
    limits = {goal.price_limit for goal in goals}
    assert len(limits) == 1 and limits <= {40.0, 50.0, 60.0}  # the larger of two of 30, 40, 50, 60
    (limit,) = limits
    end = f", and price lower than {limit:.2f} dollars"
    for goal in goals:
        (_, color), (_, size) = goal.options
        assert goal.instruction == f"Find me desk lamp with color: {color}, and size: {size}{end}"
    assert {Goals(catalogue, "synthetic", seed=seed)[0].price_limit for seed in range(20)} == {
        40.0,
        50.0,
        60.0,
    }
    human = Goals(catalogue, "human", seed=0)
    assert (len(human), human[0].options, human[0].attributes) == (
        1,
        ("dark red",),
        ("easy clean",),
    )
    assert human[0].instruction.startswith("i want a shade, and price lower than 1")


def play(options: dict[str, object], *actions: str) -> list[object]:
    env = WebShopEnv(options)
    seen: list[object] = [env.reset(WebShopEnv.tasks("heldout", options)[0])]
    for action in actions:
        seen.append(env.step(action))
    return seen


def texts(options: dict[str, object], *actions: str) -> list[str]:
    first, *rest = play(options, *actions)
    return [first.text, *(transition.observation.text for transition in rest)]  # type: ignore[attr-defined]


def test_the_pages_and_the_ways_between_them(options: dict[str, object]) -> None:
    pages = texts(
        {**options, "observation": "page"},
        *(
            "SEARCH[lamp]",
            "search[Lamp]",
            "click[B000000001]",
            "click[description]",
            "click[< prev]",
            "click[features]",
        ),
        *(
            "click[< prev]",
            "click[reviews]",
            "click[< prev]",
            "click[large | tall]",
            "click[< prev]",
            "click[next >]",
        ),
        *("click[< prev]", "click[back to search]"),
    )
    results = "'Back to Search' [SEP] 'Page 1 (Total results: 2)' [SEP] 'Next >' [SEP] "
    results += "'B000000001' [SEP] 'Acme Lamp' [SEP] "
    results += "'$19.99 to $27.99' [SEP] 'B000000002' [SEP] 'Acme Lamp Shade' [SEP] '$100.0'"
    product = (
        "'Back to Search' [SEP] '< Prev' [SEP] 'size' [SEP] 'small' [SEP] 'large | tall' [SEP] "
    )
    product += "'color' [SEP] 'dark red' [SEP] '1877brown' [SEP] 'Acme Lamp' [SEP] "
    product += "'Price: $19.99 to $27.99' [SEP] 'Rating: N.A.' [SEP] 'Description' [SEP] "
    product += "'Features' [SEP] 'Reviews' [SEP] 'Buy Now'"
    sub = "'Back to Search' [SEP] '< Prev'"
    assert pages[:6] == [
        "'Search'",
        "'Search'",
        results,
        product,
        f"{sub} [SEP] 'A lamp for the desk.'",
        product,
    ]
    assert pages[6:10] == [
        f"{sub} [SEP] 'Bright' [SEP] '' [SEP] 'Brass foot'",
        product,
        sub,
        product,
    ]
    second = "'Back to Search' [SEP] 'Page 2 (Total results: 2)' [SEP] '< Prev' [SEP] 'Next >'"
    assert pages[10:] == [product, results, second, results, "'Search'"]


def test_the_whole_text_begins_with_the_instruction_and_the_anchor_never_has_it(
    options: dict[str, object],
) -> None:
    first, second = play(options, "search[kettle]")
    instruction = first.objective  # type: ignore[attr-defined]
    assert first.text == f"WebShop [SEP] Instruction: [SEP] {instruction} [SEP] Search"  # type: ignore[attr-defined]
    assert first.anchor == "'Search'"  # type: ignore[attr-defined]
    assert first.actions == ("search[<your query>]", "click[search]")  # type: ignore[attr-defined]
    found = second.observation  # type: ignore[attr-defined]
    assert found.text.startswith(
        f"Instruction: [SEP] {instruction} [SEP] Back to Search [SEP] Page 1"
    )
    assert (
        found.anchor.startswith("'Back to Search' [SEP] 'Page 1")
        and instruction not in found.anchor
    )
    assert found.actions == ("click[back to search]", "click[next >]", "click[b000000003]")


@pytest.mark.parametrize(
    "action",
    [
        "click[search]",
        "click[nothing]",
        "click[]",
        "search[]",
        "buy",
        "",
        "look[lamp]",
        "click[buy now]",
    ],
)
def test_what_is_no_action_here_changes_nothing(options: dict[str, object], action: str) -> None:
    first, then = play(options, action)
    assert then.observation == first and not then.valid and not then.terminated  # type: ignore[attr-defined]
    assert (then.reward, then.task_score) == (0.0, 0.0)  # type: ignore[attr-defined]


def test_one_may_search_from_every_page(options: dict[str, object]) -> None:
    *_, last = play(options, "search[lamp]", "click[b000000001]", "click[small]", "search[kettle]")
    assert last.valid and "B000000003" in last.observation.text  # type: ignore[attr-defined]
    assert last.task_score == 0.0  # type: ignore[attr-defined]  # nothing bought yet


def test_a_purchase_ends_the_episode_with_its_score(options: dict[str, object]) -> None:
    """Score the lamp's own goal: 1 attribute, colour, size and price.

    It is 4 of 4 with the right options, and 2 of 4 with none chosen.
    """
    task = next(
        t
        for t in WebShopEnv.tasks("heldout", options)
        if "dark red, and size: small" in _objective(options, t)
    )
    env = WebShopEnv(options)
    for chosen, expected in (
        (("dark red", "small"), 1.0),
        (("dark red", "large | tall", "small"), 1.0),
        ((), 0.5),
    ):
        env.reset(task)
        for action in (
            "search[lamp]",
            "click[b000000001]",
            *(f"click[{value}]" for value in chosen),
        ):
            assert env.step(action).valid
        bought = env.step("click[Buy Now]")
        assert (bought.task_score, bought.reward, bought.won, bought.terminated) == (
            expected,
            expected == 1.0,
            expected == 1.0,
            True,
        )
        assert f"Your score (min 0.0, max 1.0) [SEP] {expected} [SEP]" in bought.observation.text
        assert bought.observation.actions == ()
        with pytest.raises(ValueError, match="the episode is over"):
            env.step("search[lamp]")


def _objective(options: dict[str, object], task: object) -> str:
    return WebShopEnv(options).reset(task).objective  # type: ignore[arg-type]


def goal(shop: dict[str, object], **changes: object) -> Goal:
    fields = {"instruction": "", "attributes": ("desk lamp",), "options": (), "price_limit": 20.0}
    return Goal(product=lamp(shop), **{**fields, **changes})  # type: ignore[arg-type]


def test_the_score_counts_attributes_options_and_the_price(options: dict[str, object]) -> None:
    product = lamp(options)

    def score(wanted: Goal, *, price: float = 15.0, **chosen: str) -> float:
        return reward.score(wanted, product, chosen, price=price, title_score=1.0)

    assert score(goal(options)) == 1.0
    assert score(goal(options), price=20.01) == 0.5
    assert score(goal(options, attributes=("lamp desk",))) == 1.0  # the same words
    assert score(goal(options, attributes=("brass foot",))) == 1.0  # in a bullet point
    assert score(goal(options, attributes=("for the desk",))) == 1.0  # in the description
    assert score(goal(options, attributes=("waterproof",))) == 0.5
    # a crowd worker's: colours by their base
    assert score(goal(options, options=("navy blue",)), color="blue") == 1.0
    # "dark" comes first in the list
    assert score(goal(options, options=(("color", "red"),)), color="dark red") == 2 / 3
    # "blue" comes before "navy"
    assert score(goal(options, options=(("color", "blue"),)), color="navy blue") == 1.0
    # WebShop compares the printed pair of name and value with the colour that stands for what was
    # chosen
    assert score(goal(options, options=(("color", "1877brown"),)), color="1877brown") == 2 / 3
    assert score(goal(options, options=(("size", "11"),)), size="11") == 1.0


def test_the_kind_of_product_scales_the_score(options: dict[str, object]) -> None:
    same, shade, kettle = read(Path(str(options["data"])), "small")
    assert reward.type_score(same, shade, title_score=0.15) == 1.0  # the same query
    assert reward.type_score(same, kettle, title_score=0.21) == 1.0
    assert reward.type_score(same, kettle, title_score=0.2) == 0.5
    assert reward.type_score(same, shade, title_score=0.09) == 0.1
    assert reward.type_score(same, shade, title_score=0.0) == 0.0
    assert reward.title_score(["acme", "lamp", "lamp"], ["lamp", "shade"]) == pytest.approx(1 / 3)
    assert reward.title_score([], ["lamp"]) == 0.2
    two_departments = item(
        "B000000009", "x", query="other", product_category="A › Table Lamps › Lamps"
    )
    assert (
        len(
            reward._departments(DEPARTMENTS)
            & reward._departments(str(two_departments["product_category"]))
        )
        == 2
    )


def test_nouns_are_words_unless_small_and_tagged_ones_come_first() -> None:
    assert nouns.nouns("Acme's Lamp for the Desk, 20ml - 3 Pack U.S.A", ()) == [
        "acme",
        "lamp",
        "desk",
        "20ml",
        "pack",
        "u.s.a",
    ]
    name = "x" * 300 + " Lamp  Shade"
    found = [(name.index(word), len(word)) for word in ("Lamp", "Shade")]
    tagged = nouns.Tagged(
        keys_R=nouns.np.array([nouns._key(name)], dtype="uint64"),
        starts_Rp1=nouns.np.array([0, len(nouns._spans(found))]),
        spans=nouns.np.array(nouns._spans(found), dtype="uint8"),
    )
    assert nouns.nouns(name, (tagged,)) == ["lamp", "shade"]
    assert nouns.nouns("Other", (tagged,)) == ["other"]


def test_what_html_would_not_show_is_not_there() -> None:
    assert visible("", " ", "\n", " \n ", " a ", "\u00a0") == ["", "a", ""]


def test_the_last_page_writes_options_as_html_safe_json(options: dict[str, object]) -> None:
    page = done_page(lamp(options), {"size": "6' & <up>", "color": "é"}, score=0.25)
    assert '{"color": "\\u00e9", "size": "6\\u0027 \\u0026 \\u003cup\\u003e"}' in page.texts


def test_results_without_products_and_texts_of_a_sub_page(options: dict[str, object]) -> None:
    empty = results_page([], number=1, n_hits=0)
    assert empty.texts == ("Back to Search", "Page 1 (Total results: 0)", "Next >")
    assert sub_page(lamp(options), "reviews").texts == ("Back to Search", "< Prev")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"catalogue": "big"}, "catalogue='big' must be one of small, full"),
        ({"heldout": "train"}, "heldout='train' must be one of test, eval"),
        ({"seed": -1}, "seed=-1 must be a whole number"),
        ({"train_tasks": True}, "train_tasks=True must be"),
        ({"data": "/no/such"}, "data='/no/such' is no folder; docs/webshop.md"),
        ({"more": 1}, "missing or unknown: more; it takes"),
        ({"catalogue": "full"}, "make it with: python -P -m envs.webshop pack"),
    ],
)
def test_options_that_cannot_be_played_are_refused_by_name(
    options: dict[str, object], changes: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        WebShopEnv.tasks("heldout", {**options, **changes})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["webshop_qwen2.5_1.5b", "webshop_qwen2.5_7b"])
def test_the_papers_configs_give_every_option(options: dict[str, object], name: str) -> None:
    config = configs.load(ROOT / "configs" / f"{name}.yaml")
    environment_class(config.env.name)({**config.env.options, "data": options["data"]})


def test_missing_files_and_splits_are_refused_by_name(
    options: dict[str, object], tmp_path: Path
) -> None:
    with pytest.raises(
        ValueError,
        match="no train tasks: 4 synthetic instructions, and train ones begin at number 1500",
    ):
        WebShopEnv.tasks("train", options)
    with pytest.raises(ValueError, match=r"no file 'items_shuffle_1000.json'"):
        WebShopEnv.tasks("heldout", {**ALL, "data": str(tmp_path)})
    with pytest.raises(ValueError, match="split 'test' is not one of"):
        WebShopEnv.tasks("test", options)
    with pytest.raises(ValueError, match="missing or unknown: .*heldout"):
        WebShopEnv({"data": str(tmp_path)})


def test_the_packed_full_catalogue_plays_as_the_same_products_do_unpacked(tmp_path: Path) -> None:
    many = item(
        "B000000007", "Rug", customization_options={"size": choices(*(str(n) for n in range(40)))}
    )
    small = write_shop(tmp_path / "small", items=[*ITEMS, many])
    full = {**write_shop(tmp_path / "full", suffix="", items=[*ITEMS, many]), "catalogue": "full"}
    done = subprocess.run(
        [sys.executable, "-m", "envs.webshop", "pack", str(full["data"])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("4 products in ")
    actions = ("search[acme lamp shade]", "click[b000000001]", "click[small]", "click[buy now]")
    assert play(small, *actions) == play(full, *actions)
    assert (
        sorted(
            path.name for path in Path(str(full["data"])).iterdir() if path.name.startswith("tmp")
        )
        == []
    )


class TwoNouns:
    """Stands for a spaCy model: the first and the last word of every name are nouns."""

    def pipe(self, names: Iterable[str]) -> Iterator[SimpleNamespace]:
        for name in names:
            words = [(match.start(), match[0]) for match in re.finditer(r"\S+", name)]
            tags = ["PROPN"] + ["ADJ"] * (len(words) - 2) + ["NOUN"]
            tokens = [
                SimpleNamespace(idx=at, text=word, pos_=tag)
                for (at, word), tag in zip(words, tags, strict=True)
            ]
            yield type("Document", (list,), {"text": name})(tokens)  # type: ignore[misc]


def test_nouns_are_tagged_once_and_then_looked_up(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Path(str(options["data"]))
    monkeypatch.setitem(
        sys.modules, "spacy", SimpleNamespace(load=lambda model, exclude: TwoNouns())
    )
    monkeypatch.setattr(sys, "argv", ["webshop", "nouns", str(data), "small", "a_model"])
    assert webshop_main() == 0
    assert "3 names in" in capsys.readouterr().out
    tagged = (nouns.load(data / nouns.TAGGED),)
    assert nouns.nouns("Acme Lamp Shade", tagged) == ["acme", "shade"]
    assert nouns.nouns("Acme Lamp Foot", tagged) == ["acme", "lamp", "foot"]


def test_nouns_that_were_not_written_whole_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tagged = nouns.load(nouns.TAGGED_SMALL)
    save = nouns.np.savez_compressed

    def cut(path: Path, **arrays: object) -> None:
        save(path, **arrays)
        raise OSError("disk full")

    tagged.save(tmp_path / nouns.TAGGED)
    before = (tmp_path / nouns.TAGGED).read_bytes()
    monkeypatch.setattr(nouns.np, "savez_compressed", cut)
    with pytest.raises(OSError, match="disk full"):
        nouns.Tagged(
            keys_R=tagged.keys_R[:1], starts_Rp1=tagged.starts_Rp1[:2], spans=tagged.spans[:2]
        ).save(tmp_path / nouns.TAGGED)
    assert (tmp_path / nouns.TAGGED).read_bytes() == before


def test_without_spacy_the_command_says_so_in_one_line(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "spacy", None)
    monkeypatch.setattr(sys, "argv", ["webshop", "nouns", str(options["data"]), "small", "a_model"])
    assert webshop_main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "spacy" in line


def test_of_two_options_with_the_same_value_the_last_is_chosen(tmp_path: Path) -> None:
    twice = item(
        "B000000001",
        "Rug",
        customization_options={"Size": choices("red", "1"), "Color": choices("red", "red")},
    )
    options = write_shop(tmp_path / "shop", items=[twice])
    *_, bought = play(
        options, "search[rug]", "click[b000000001]", "click[red]", "click[1]", "click[buy now]"
    )
    assert 'options [SEP] {"color": "red", "size": "1"} [SEP]' in bought.observation.text  # type: ignore[attr-defined]


def test_environments_of_one_process_share_the_shop_and_keep_apart(
    options: dict[str, object],
) -> None:
    one, other = (environment_class("webshop")(options) for _ in range(2))
    task = WebShopEnv.tasks("heldout", options)[0]
    one.reset(task), other.reset(task)
    one.step("search[lamp]")
    assert "Search" in other.step("nonsense").observation.text and one._shop is other._shop  # type: ignore[attr-defined]
    assert LAMP["asin"].lower() in str(one.step("nonsense").observation.actions)


@settings(max_examples=500)
@given(st.text("a[]\n ", max_size=12))
def test_an_action_is_read_as_by_webshops_pattern(action: str) -> None:
    found = re.match(r"(.+)\[(.+)\]", action)
    assert read_action(action) == ((found[1], found[2]) if found else ("", ""))


def test_an_action_of_many_brackets_is_read_at_once() -> None:
    """The attack: the pattern searches to the end of the text from each of them."""
    assert read_action("[" * 1_000_000) == ("", "")
    assert read_action("click[" * 300_000 + "x]") == (("click[" * 300_000)[:-1], "x")
