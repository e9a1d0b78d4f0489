"""Show lineage: the weights that wrote a row, its file, what it trained, and where that went.

    weights -> rows -> files -> learner step -> published weights -> checkpoint

Each box leads to its own lineage, so the chain is walked both ways. A segment is named by the
digest of its bytes, so the path of a file holds its digest.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from markupsafe import Markup

from analysis.view.html import html
from analysis.view.page import BadAddressError, Page, PageRequest, as_integer, as_uid
from analysis.view.panel import Panel, show_rows
from analysis.view.sql_text import fill
from store import RunLayout, is_directory

LISTED_STEPS = 100
BOXES = 6  # of a stage; the others are counted
KINDS = ("traj", "group", "learner_step", "version", "checkpoint")
STAGES = {
    1: ("weights that wrote it", "published versions; the digest is of the weights' bytes"),
    2: ("rows", "the steps of whole episodes"),
    3: ("file", "a segment: an immutable file, named by the BLAKE2b digest of its bytes"),
    4: ("learner step", "the consumed batch"),
    5: ("weights it published", "the version that this learner step made"),
    6: ("first checkpoint with it", "the first one that was saved after the learner step"),
}
VERSION_COLUMNS = (
    *("version", "version_min", "version_max", "version_in", "published"),
    *("oldest_version", "newest_version"),
)
DIGEST = re.compile(r"([0-9a-f]{32})\.parquet$")

OF_TRAJECTORY = """
SELECT group_uid, min(version_min) AS oldest, max(version_max) AS newest
FROM steps WHERE traj_uid = $traj GROUP BY group_uid
"""
OF_GROUP = """
SELECT group_uid, version_min AS oldest, version_max AS newest FROM groups WHERE group_uid = $group
"""
OF_STEPS = """
SELECT min(version_min) AS oldest, max(version_max) AS newest, count(*) AS groups
FROM lineage WHERE batch_state = 'trained' AND live AND learner_step BETWEEN $first AND $last
"""
OF_VERSION = """
SELECT v.version, (SELECT max(learner_step) FROM lineage
    WHERE batch_state = 'trained' AND live AND version_in = v.version - 1) AS learner_step
FROM versions AS v WHERE v.version = $version
"""
OF_CHECKPOINT = """
SELECT * FROM (
    SELECT learner_step, path, version,
           lag(learner_step) OVER (ORDER BY learner_step) AS before FROM checkpoints WHERE live)
WHERE path = $path OR learner_step = try_cast($path AS BIGINT)
"""
# `chosen`: groups in batches; `held`: the rows in question, each with the file that holds it.
CHAIN = """
WITH chosen AS (
    SELECT * FROM lineage WHERE batch_state = 'trained' AND live AND {chosen}),
held AS (
    SELECT traj_uid, group_uid, version_min, version_max, split, file AS path FROM stored_steps
    WHERE {held}),
written AS (
    SELECT version, sum(n) AS steps FROM (
        SELECT version_min AS version, count(*) AS n FROM held WHERE split <> 'imported' GROUP BY 1
        UNION ALL
        SELECT version_max, count(*) FROM held
        WHERE split <> 'imported' AND version_max > version_min GROUP BY 1)
    GROUP BY version),
steps_of AS (
    SELECT learner_step, max(version_in) + 1 AS published, max(trained_at) AS trained_at,
           count(*) AS n_groups, count(*) FILTER (outcome = 'trained') AS n_trained,
           max(staleness) AS staleness
    FROM chosen GROUP BY learner_step),
saved AS (
    SELECT min(c.learner_step) AS learner_step FROM steps_of AS s
    JOIN checkpoints AS c ON c.live AND c.learner_step >= s.learner_step GROUP BY s.learner_step),
boxes AS (
    SELECT 1 AS stage, 'version' AS kind, version::VARCHAR AS name,
           'version ' || version AS title, digest, published_at AS happened_at,
           'wrote ' || steps || ' steps' AS detail, version AS box_order
    FROM written LEFT JOIN versions USING (version)
    UNION ALL BY NAME
    SELECT DISTINCT 1 AS stage, 'source' AS kind, source AS name, 'another run' AS title,
           source AS detail, -1 AS box_order FROM chosen WHERE source IS NOT NULL
    UNION ALL BY NAME
    SELECT 2 AS stage, 'group' AS kind, h.group_uid::VARCHAR AS name, g.task_id AS title,
           h.steps || ' steps, ' || h.episodes || ' episodes, ' || g.state AS detail,
           row_number() OVER (ORDER BY g.opened_at DESC, g.group_uid) AS box_order
    FROM (SELECT group_uid, count(*) AS steps, count(DISTINCT traj_uid) AS episodes
          FROM held GROUP BY group_uid) AS h JOIN groups AS g USING (group_uid)
    UNION ALL BY NAME
    SELECT 3 AS stage, 'file' AS kind, path AS name, split_part(path, '/', 2) AS title,
           count(*) || ' of these steps' AS detail,
           row_number() OVER (ORDER BY count(*) DESC, path) AS box_order
    FROM held GROUP BY path
    UNION ALL BY NAME
    SELECT 4 AS stage, 'learner_step' AS kind, learner_step::VARCHAR AS name,
           'learner step ' || learner_step AS title, trained_at AS happened_at,
           n_trained || ' of ' || n_groups || ' groups taught'
           || coalesce(', staleness ' || staleness, '') AS detail, -learner_step AS box_order
    FROM steps_of
    UNION ALL BY NAME
    SELECT 5 AS stage, 'version' AS kind, published::VARCHAR AS name,
           'version ' || published AS title, digest, published_at AS happened_at,
           v.path AS detail, -published AS box_order
    FROM steps_of LEFT JOIN versions AS v ON v.version = published
    UNION ALL BY NAME
    SELECT 6 AS stage, 'checkpoint' AS kind, path AS name, 'step ' || learner_step AS title,
           saved_at AS happened_at, path AS detail, -learner_step AS box_order
    FROM checkpoints SEMI JOIN saved USING (learner_step) WHERE live)
SELECT stage, kind, name, title, digest, happened_at, detail,
       count(*) OVER (PARTITION BY stage) AS of_stage
FROM boxes QUALIFY row_number() OVER (PARTITION BY stage ORDER BY box_order) <= $boxes
ORDER BY stage, box_order
"""
# Only the file of a copy that does not count is known.
EPISODES = """
WITH held AS (
    SELECT member AS episode, traj_uid, count(*) AS steps, min(version_min) AS version_min,
           max(version_max) AS version_max, file, TRUE AS counts
    FROM stored_steps WHERE {held} GROUP BY member, traj_uid, file),
copies AS (
    SELECT h.episode, h.traj_uid, e.path AS file, FALSE AS counts
    FROM exported.excluded AS e JOIN held AS h ON e.traj_uid::UUID = h.traj_uid)
SELECT episode, traj_uid, steps, version_min, version_max,
       regexp_extract(file, '([0-9a-f]+)[.]parquet$', 1) AS file_digest, file, counts
FROM (FROM held UNION ALL BY NAME FROM copies) ORDER BY episode, counts DESC, file
"""
CONSUMED = """
SELECT learner_step, outcome, live, staleness, version_in, version_in + 1 AS published,
       oldest_weights_digest AS oldest_digest, newest_weights_digest AS newest_digest, claimed_at,
       trained_at
FROM lineage WHERE group_uid = $group ORDER BY batch_id
"""
GROUPS = """
SELECT learner_step, group_uid, l.task_id, outcome, staleness, n_steps AS steps,
       l.version_min AS oldest_version, l.version_max AS newest_version,
       oldest_weights_digest AS oldest_digest, newest_weights_digest AS newest_digest, trained_at
FROM lineage AS l LEFT JOIN groups AS g USING (group_uid)
WHERE batch_state = 'trained' AND live AND learner_step BETWEEN $first AND $last
ORDER BY learner_step DESC, group_uid
"""
PAST = """
SELECT count(DISTINCT learner_step) AS learner_steps, count(*) AS groups,
       count(*) FILTER (outcome = 'trained') AS taught, sum(n_members) AS episodes,
       sum(n_steps) AS steps, count(DISTINCT l.task_id) AS tasks, min(claimed_at) AS since,
       max(trained_at) AS until
FROM lineage AS l LEFT JOIN groups AS g USING (group_uid)
WHERE batch_state = 'trained' AND live AND learner_step <= $last
"""
PLAYED = """
SELECT g.group_uid, g.task_id, g.split, g.state, l.learner_step, g.n_steps AS steps,
       g.version_min AS oldest_version, g.version_max AS newest_version, g.completed_at
FROM groups AS g LEFT JOIN (
    SELECT group_uid, max(learner_step) AS learner_step FROM lineage
    WHERE batch_state = 'trained' AND live GROUP BY group_uid) AS l USING (group_uid)
WHERE g.version_min <= $version AND g.version_max >= $version AND g.split <> 'imported'
ORDER BY l.learner_step DESC NULLS LAST, g.group_uid
"""
NEWEST = """
SELECT l.learner_step, l.groups, l.taught, l.oldest AS oldest_version, v.version AS published,
       v.digest, c.path AS checkpoint, l.trained_at
FROM (SELECT learner_step, count(*) AS groups, count(*) FILTER (outcome = 'trained') AS taught,
             min(version_min) AS oldest, max(version_in) + 1 AS version,
             max(trained_at) AS trained_at
      FROM lineage WHERE batch_state = 'trained' AND live GROUP BY learner_step) AS l
LEFT JOIN versions AS v USING (version)
LEFT JOIN checkpoints AS c ON c.live AND c.learner_step = l.learner_step
ORDER BY l.learner_step DESC LIMIT $rows
"""
CHECKPOINTS = """
SELECT learner_step, path AS checkpoint, version, digest,
       learner_step - coalesce(lag(c.learner_step) OVER (ORDER BY c.learner_step), 0) AS new_steps,
       saved_at
FROM (FROM checkpoints WHERE live) AS c LEFT JOIN (SELECT version, digest FROM versions)
USING (version) ORDER BY learner_step DESC
"""
NOT_THERE = Markup('<p class="empty">The run has no such {} at this moment.</p>')


def panels(asked: PageRequest) -> Sequence[Panel]:
    """Return the lineage of what the address names, or lists to begin with."""
    given = [(kind, asked.text(kind)) for kind in KINDS if asked.text(kind)]
    if len(given) > 1:
        raise BadAddressError(f"give one of {', '.join(KINDS)}")
    kind, name = given[0] if given else (asked.text("of"), asked.text("name"))
    if kind is None or name is None:
        return start(asked)
    if kind not in KINDS:
        raise BadAddressError(f"of is one of {', '.join(KINDS)}")
    if kind in ("traj", "group"):
        return of_rows(asked, kind, as_uid(kind, name))
    if kind == "checkpoint":
        found = asked.rows(fill(OF_CHECKPOINT, path=name))
        if not found:
            return [_missing(asked, kind)]
        first = (found[0]["before"] or 0) + 1
        return of_steps(asked, kind, found[0]["path"], first=first, last=found[0]["learner_step"])
    number = as_integer(kind, name)
    if number < 0:
        raise BadAddressError(f"{kind} is a number from 0 on")
    if kind == "learner_step":
        return of_steps(asked, kind, str(number), first=number, last=number)
    return of_version(asked, number)


def start(asked: PageRequest) -> Sequence[Panel]:
    """Return the lists from which a lineage is chosen."""
    return [
        Panel(
            title="Learner steps",
            explains=f"The newest {LISTED_STEPS}: what each consumed and published. Every name "
            "leads to its lineage.",
            query=fill(NEWEST, rows=LISTED_STEPS),
            show=partial(_linked, asked),
            above=_form(asked, None, None),
            empty="No learner step is done yet.",
            width="full",
        ),
        Panel(
            title="Checkpoints",
            explains="Those that no roll-back went behind, how many learner steps each added, and "
            "whether it is on disk now: old ones are removed, but for those of keep_every.",
            query=CHECKPOINTS,
            show=partial(_linked, asked),
            combine=partial(with_presence, asked.run),
            keeps=False,  # removing a checkpoint changes no lsn
            empty="No checkpoint was saved yet.",
            width="full",
        ),
    ]


def of_rows(asked: PageRequest, kind: str, uid: uuid.UUID) -> Sequence[Panel]:
    """Return the lineage of a trajectory or a group."""
    query = OF_TRAJECTORY if kind == "traj" else OF_GROUP
    found = asked.rows(fill(query, traj=uid, group=uid))
    if not found:
        return [_missing(asked, "trajectory" if kind == "traj" else kind)]
    group = uuid.UUID(found[0]["group_uid"])
    # Whole files are spared by their versions.
    held = "TRUE" if found[0]["oldest"] is None else _within(found[0])
    held += fill(" AND group_uid = $group", group=group)
    if kind == "traj":
        held += fill(" AND traj_uid = $traj", traj=uid)
    chosen = fill("group_uid = $group", group=group)
    return [
        _chain(asked, kind, str(uid), chosen=chosen, held=held),
        Panel(
            title="Rows and files",
            explains="Each episode, the file that holds it, and that file's digest. A copy that "
            "another worker wrote first counts; a second one does not.",
            query=EPISODES.replace("{held}", held),
            show=partial(_linked, asked),
            empty="No row of it is there yet.",
            width="full",
        ),
        Panel(
            title="Consumed",
            explains="The batches that the group was in. Those that are not live were rolled back.",
            query=fill(CONSUMED, group=group),
            show=partial(_linked, asked),
            empty="No learner step consumed it.",
            width="full",
        ),
    ]


def of_steps(asked: PageRequest, kind: str, name: str, *, first: int, last: int) -> Sequence[Panel]:
    """Return the lineage of learner steps: one, or those that a checkpoint added."""
    (found,) = asked.rows(fill(OF_STEPS, first=first, last=last))
    if not found["groups"]:
        return [_missing(asked, kind.replace("_", " "))]
    chosen = fill("learner_step BETWEEN $first AND $last", first=first, last=last)
    held = f"{_within(found)} AND group_uid IN (SELECT group_uid FROM chosen)"
    chain = _chain(asked, kind, name, chosen=chosen, held=held)
    groups = Panel(
        title="Groups",
        explains="What the learner step consumed, and the weights that wrote it.",
        query=fill(GROUPS, first=first, last=last),
        show=partial(_linked, asked),
        width="full",
    )
    if kind == "learner_step":
        return [chain, groups]
    all_groups = replace(
        groups,
        title="All groups that made it",
        explains="From the newest learner step back to the first one.",
        query=fill(GROUPS, first=0, last=last),
    )
    return [chain, _past(last), all_groups]


def of_version(asked: PageRequest, version: int) -> Sequence[Panel]:
    """Return the lineage of a version: what made it, and what it played."""
    found = asked.rows(fill(OF_VERSION, version=version))
    if not found:
        return [_missing(asked, "version")]
    step = found[0]["learner_step"]
    made = (
        of_steps(asked, "version", str(version), first=step, last=step) if step is not None else []
    )
    return [
        *made[:-1],
        Panel(
            title="What these weights played",
            explains=f"Groups with at least one step that version {version} wrote, and the learner "
            "steps that consumed them.",
            query=fill(PLAYED, version=version),
            show=partial(_linked, asked),
            above="" if made else _form(asked, "version", str(version)),
            empty="These weights played nothing that is stored.",
            width="full",
        ),
        *made[-1:],
    ]


def with_presence(run: str, table: pa.Table) -> pa.Table:
    """Add a column to rows with a learner step: is the checkpoint's directory there? On disk here.

    Raises StoreError if the run is gone, ArrowException for steps that are no numbers.
    """
    layout = RunLayout.open(Path(run))
    steps = table["learner_step"].cast(pa.int64()).to_pylist()
    is_there = [step is not None and _has_checkpoint(layout, step) for step in steps]
    shown = ["yes" if each else "removed" for each in is_there]
    return table.add_column(1, "on_disk", pa.array(shown, pa.string()))


def _has_checkpoint(layout: RunLayout, learner_step: int) -> bool:
    return is_directory(layout.checkpoint_dir(learner_step), root=layout.root)


def show_chain(asked: PageRequest, kind: str, name: str, table: pa.Table) -> Markup:
    """Draw the stages as boxes that lead to one another."""
    rows = table.to_pylist()
    boxes = [
        {
            **row,
            "link": _address(asked, row["kind"], row["name"]),
            "digest": row["digest"] or _digest_of(row["name"]),
            "is_here": row["name"] == name and row["kind"] == kind,
        }
        for row in rows
    ]
    stages = []
    for number, (title, hint) in STAGES.items():
        shown = [box for box in boxes if box["stage"] == number]
        more = shown[0]["of_stage"] - len(shown) if shown else 0
        stages.append({"title": title, "hint": hint, "boxes": shown, "more": more})
    return html("lineage_chain.html", stages=stages)


def _chain(asked: PageRequest, kind: str, name: str, *, chosen: str, held: str) -> Panel:
    query = CHAIN.replace("{chosen}", chosen).replace("{held}", held)
    return Panel(
        title="Chain",
        explains="From the weights that wrote the rows to the checkpoint that contains what they "
        "taught. Every box leads to its own chain.",
        query=query.replace("$boxes", str(BOXES)),
        show=partial(show_chain, asked, kind, name),
        above=_form(asked, kind, name),
        empty="Nothing of it is stored at this moment.",
        width="full",
    )


def _past(last: int) -> Panel:
    return Panel(
        title="Its whole past",
        explains="Everything that was consumed up to here, in all learner steps that count.",
        query=fill(PAST, last=last),
        width="full",
    )


def _missing(asked: PageRequest, what: str) -> Panel:
    return Panel(
        title="Chain",
        explains="From the weights that wrote the rows to the checkpoint that contains what they "
        "taught.",
        above=_form(asked, None, None) + NOT_THERE.format(what),
        width="full",
    )


def _form(asked: PageRequest, kind: str | None, name: str | None) -> Markup:
    return html("lineage_form.html", asked=asked, kinds=KINDS, kind=kind, name=name)


def _linked(asked: PageRequest, table: pa.Table) -> Markup:
    """Show rows with a link from each name to its lineage, from a group or episode to its page."""

    links = {name: asked.row_link("/lineage", {"version": name}) for name in VERSION_COLUMNS}
    for name in ("learner_step", "checkpoint"):
        links[name] = asked.row_link("/lineage", {name: name})
    links["group_uid"] = asked.row_link("/group", {"group": "group_uid"})
    links["traj_uid"] = asked.row_link("/trajectory", {"traj": "traj_uid"})
    return show_rows(table, links=links)


def _address(asked: PageRequest, kind: str, name: str) -> str | None:
    return asked.link("/lineage", **{kind: name}) if kind in KINDS else None


def _digest_of(name: str) -> str | None:
    found = DIGEST.search(name)
    return found[1] if found else None


def _within(found: Mapping[str, Any]) -> str:
    return fill(
        "version_min >= $oldest AND version_max <= $newest",
        oldest=found["oldest"],
        newest=found["newest"],
    )


PAGE = Page(
    path="/lineage",
    title="Lineage",
    question="Which weights and files does a row come from, and which weights did it make?",
    panels=panels,
    example="SELECT group_uid AS \"group\" FROM lineage WHERE batch_state = 'trained' AND live "
    "ORDER BY learner_step, group_uid LIMIT 1",
)
