"""Make small games of all six types without data, with ALFWorld's own rules and texts.

A game is a room with six places and four things. Its name says everything about it,
`TYPE-OBJECT-PLACE-SEED`, so nothing is stored. Each (object, place) pair belongs to one split
alone: a policy that has learned training games by heart does not know held-out ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import count, islice, product
from pathlib import Path

from envs.alfworld.games import TASK_MARK, TASK_TYPES, Game
from envs.options import OptionsError

# Each object with the changes that ALFWorld allows.
OBJECTS = {
    "Apple": "clean heat cool", "Book": "", "Bread": "heat cool", "CellPhone": "",
    "Cloth": "clean", "Cup": "clean heat cool", "Egg": "clean heat cool", "KeyChain": "",
    "Kettle": "clean", "Mug": "clean heat cool", "Newspaper": "", "Pen": "",
    "Plate": "clean heat cool", "Potato": "clean heat cool", "SoapBar": "clean",
    "Tomato": "clean heat cool", "Vase": "",
}  # fmt: skip
PLACES = (
    "ArmChair", "Bed", "Cabinet", "CounterTop", "Desk", "Drawer", "Dresser", "Safe", "Shelf",
    "SideTable", "Sofa",
)  # fmt: skip
OPENABLE = ("Cabinet", "Drawer", "Safe", "Fridge", "Microwave")
# How a task type changes the object: verb, appliance, resulting predicate.
VERBS = {
    "pick_clean_then_place_in_recep": ("clean", "SinkBasin", "isClean"),
    "pick_heat_then_place_in_recep": ("heat", "Microwave", "isHot"),
    "pick_cool_then_place_in_recep": ("cool", "Fridge", "isCool"),
}
LAMP = "DeskLamp"
LOOK, TWO = "look_at_obj_in_light", "pick_two_obj_and_place"
EXTRA_PLACES, EXTRA_THINGS = 4, 2
HELDOUT_SHARE = 4  # one pair in four is kept for the held-out split


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    places: tuple[str, ...]  # types; one of each
    # (object type, place type); the task's object or objects first
    things: tuple[tuple[str, str], ...]
    target: str  # the place that the task names; for LOOK the lamp's place


def list_generated(
    split: str, games: int, *, seed: int, task_types: Sequence[str]
) -> list[tuple[str, str]]:
    """Return (name, task type) of the first games of a split, by turns of each type.

    Raises OptionsError for 0 games, which means all: the sequence has no end.
    """
    if games == 0:
        raise OptionsError(
            f"alfworld option {split}_games=0 means all games, and generated games have no end: "
            f"set {split}_games to a number, or data to a folder with games"
        )
    return list(islice(_names(split, seed=seed, task_types=task_types), games))


def read_generated(name: str) -> Game:
    """Make the game of that name. Raises ValueError for any other name."""
    kind, object_, place = (*name.split("-"), "", "")[:3]
    is_known = kind in TASK_TYPES and object_ in OBJECTS and place in PLACES
    if not is_known or name.count("-") != 3:
        raise ValueError(
            f"alfworld: {name!r} is no generated game; set env.options.data to the folder that has "
            "it"
        )
    scene = _scene(name, kind, object_, place)
    domain, grammar = _rules()
    return Game(
        domain=domain,
        grammar=grammar,
        problem=_problem(kind, object_, scene),
        task=f"Your task is to: {_sentence(kind, object_.lower(), place.lower())}.",
        walkthrough=_walkthrough(kind, scene),
    )


def pairs(split: str, kind: str) -> list[tuple[str, str]]:
    """Return the (object, place) pairs of a type and split. They depend on nothing else."""
    verb = VERBS[kind][0] if kind in VERBS else ""
    both = list(product(OBJECTS, PLACES))
    random.Random("alfworld pairs").shuffle(both)
    border = len(both) // HELDOUT_SHARE
    chosen = both[:border] if split == "heldout" else both[border:]
    return [(object_, place) for object_, place in chosen if verb in OBJECTS[object_]]


def _names(split: str, *, seed: int, task_types: Sequence[str]) -> Iterator[tuple[str, str]]:
    chosen = {kind: pairs(split, kind) for kind in task_types}
    for number in count():
        for kind in task_types:
            object_, place = random.Random(f"{split} {seed} {kind} {number}").choice(chosen[kind])
            yield f"{kind}-{object_}-{place}-{seed}_{number}", kind


def _scene(name: str, kind: str, object_: str, target: str) -> Scene:
    draw = random.Random(name)
    others = draw.sample([place for place in PLACES if place != target], EXTRA_PLACES)
    appliance = [VERBS[kind][1]] if kind in VERBS else []
    wanted = [object_] * (2 if kind == TWO else 1)
    extra = draw.sample([thing for thing in OBJECTS if thing != object_], EXTRA_THINGS)
    places = [target, *others, *appliance]
    draw.shuffle(places)
    return Scene(
        places=tuple(places),
        things=tuple((thing, draw.choice(others)) for thing in (*wanted, *extra)),
        target=target,
    )


def _sentence(kind: str, object_: str, place: str) -> str:
    if kind == LOOK:
        return f"look at {object_} under the {LAMP.lower()}"
    if kind == TWO:
        return f"put two {object_} in {place}"
    if kind in VERBS:
        return f"{VERBS[kind][0]} some {object_} and put it in {place}"
    return f"put some {object_} in {place}"


def _walkthrough(kind: str, scene: Scene) -> tuple[str, ...]:
    """Return a solution.

    ALFWorld numbers things of one type from the last id down, and `_problem` gives ids in order: of
    two things the first is number 2.
    """
    commands: list[str] = []
    opened: set[str] = set()

    def go(place: str) -> None:
        commands.append(f"go to {place.lower()} 1")
        if place in OPENABLE and place not in opened:
            opened.add(place)
            commands.append(f"open {place.lower()} 1")

    wanted = 2 if kind == TWO else 1
    for number, (object_, place) in zip(range(wanted, 0, -1), scene.things[:wanted], strict=True):
        thing = f"{object_.lower()} {number}"
        go(place)
        commands.append(f"take {thing} from {place.lower()} 1")
        if kind in VERBS:
            verb, appliance, _ = VERBS[kind]
            commands += [
                f"go to {appliance.lower()} 1",
                f"{verb} {thing} with {appliance.lower()} 1",
            ]
        go(scene.target)
        commands.append(
            f"use {LAMP.lower()} 1" if kind == LOOK else f"move {thing} to {scene.target.lower()} 1"
        )
    return tuple(commands)


def _problem(kind: str, object_: str, scene: Scene) -> str:
    things = [*scene.things, *([(LAMP, scene.target)] if kind == LOOK else [])]
    place_ids = {
        place: f"{place.removesuffix('Basin')}_bar_{n}{_basin(place)}"
        for n, place in enumerate(scene.places)
    }
    locations = {place: f"loc_bar_{n}" for n, place in enumerate(scene.places)}
    declared = ["agent1 - agent", "loc_bar_start - location"]
    facts = ["(atLocation agent1 loc_bar_start)"]
    for place, at in locations.items():
        declared += [f"{at} - location", f"{place_ids[place]} - receptacle"]
        facts += [
            f"(receptacleType {place_ids[place]} {place}Type)",
            f"(receptacleAtLocation {place_ids[place]} {at})",
        ]
        facts += [f"(openable {place_ids[place]})"] if place in OPENABLE else []
        facts += [f"(canContain {place}Type {thing}Type)" for thing in OBJECTS]
    for number, (thing, place) in enumerate(things):
        id_ = f"{thing}_bar_{number}"
        declared.append(f"{id_} - object")
        facts += [f"(objectType {id_} {thing}Type)", f"(objectAtLocation {id_} {locations[place]})"]
        facts += [
            f"(inReceptacle {id_} {place_ids[place]})",
            f"({'toggleable' if thing == LAMP else 'pickupable'} {id_})",
        ]
        facts += [f"({verb}able {id_})" for verb in OBJECTS.get(thing, "").split()]
    declared += [
        f"{place}Type - rtype" for place in (*PLACES, "SinkBasin", "Sink", "Microwave", "Fridge")
    ]
    declared += [f"{thing}Type - otype" for thing in (*OBJECTS, LAMP, "Knife", "ButterKnife")]
    goal = _goal(kind, object_, scene.target)
    body = f"(:objects {' '.join(declared)})\n(:init {' '.join(facts)})\n(:goal {goal})"
    return f"(define (problem generated)\n(:domain alfred)\n{body})\n"


def _basin(place: str) -> str:
    # ALFWorld names it "sinkbasin" by this end of its id
    return "_bar_SinkBasin" if place == "SinkBasin" else ""


def _goal(kind: str, object_: str, place: str) -> str:
    if kind == LOOK:
        lit = (
            f"(objectType ?t {LAMP}Type) (isToggled ?t) (inReceptacle ?t ?r) "
            "(receptacleAtLocation ?r ?l) (atLocation ?a ?l)"
        )
        held = f"(exists (?o - object) (and (objectType ?o {object_}Type) (holds ?a ?o)))"
        return f"(exists (?t - object ?r - receptacle ?a - agent ?l - location) (and {lit} {held}))"
    there = f"(receptacleType ?r {place}Type) (objectType ?o {object_}Type) (inReceptacle ?o ?r)"
    if kind in VERBS:
        there += f" ({VERBS[kind][2]} ?o)"
    if kind == TWO:
        another = f"(not (= ?o ?p)) (objectType ?p {object_}Type) (inReceptacle ?p ?r)"
        there += f" (exists (?p - object) (and {another}))"
    return f"(exists (?r - receptacle ?o - object) (and {there}))"


@cache
def _rules() -> tuple[str, str]:
    """Return domain and grammar of the installed alfworld.

    It is not imported, which would create its cache directory.
    """
    found = find_spec("alfworld")
    if found is None or not found.submodule_search_locations:
        raise ValueError(
            "alfworld: the rules of the games come with the package alfworld; pip install "
            "'async-gigpo[alfworld]'"
        )
    folder = Path(found.submodule_search_locations[0]) / "data"
    grammar = (
        (folder / "alfred.twl2").read_text().replace("Your task is to: UNKNOWN GOAL.", TASK_MARK)
    )
    return (folder / "alfred.pddl").read_text(), grammar
