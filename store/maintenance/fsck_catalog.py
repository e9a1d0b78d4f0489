"""fsck, level 1: check that the catalog agrees with itself.

Each rule is a query that returns no row when all is well. Before them the file itself is looked at:
its pages, its texts, and whose catalog it is.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from itertools import groupby, islice
from operator import itemgetter

from printable import counted
from store.catalog.connection import DAMAGED_PAGES, opened_read_only
from store.catalog.log_check import FROM_OPEN_EVENTS
from store.catalog.schema_check import LARGEST_COUNTER, SCHEMA
from store.layout import RunLayout
from store.maintenance.finding import Finding, found
from store.records import uid_text

MAX_LINES = 5  # of integrity_check; a torn file has thousands
ROWS_AT_ONCE = 4_096  # of a table: their texts are decoded together, not one by one
ALL_LINES = 2**31 - 1  # SQLite's largest number for it
MAX_FINDINGS = 1_000  # of one rule: every row of a stranger's catalog may be wrong
REPAIRED_RULES = frozenset({"group_sums"})  # a repair needs every finding
NULL_LINE = re.compile(r"NULL value in (\w+)\.(\w+)")

# A consumed group's sums still count the trajectories whose file was lost: the learner saw them.
_LOST = """(SELECT group_uid, count(DISTINCT traj_uid) AS n FROM lost_trajectory
            WHERE traj_uid NOT IN (SELECT traj_uid FROM trajectory) GROUP BY group_uid)"""
_SUMS = """(SELECT group_uid, count(*) AS n, sum(n_steps) AS steps, sum(won) AS won,
                   sum(episode_return) AS returns, min(version_min) AS oldest,
                   max(version_max) AS newest FROM trajectory GROUP BY group_uid)"""
# When each learner step was first published: a group is weighed by the results up to the last one
# before it was opened (store/catalog/task_results.py).
_FIRST_PUBLISHED = """
            SELECT 0 AS lsn
            UNION SELECT lsn
            FROM (SELECT lsn, learner_step,
                         max(learner_step) OVER (ORDER BY lsn ROWS BETWEEN
                             UNBOUNDED PRECEDING AND 1 PRECEDING) AS step_before
                  FROM version WHERE learner_step IS NOT NULL)
            WHERE step_before IS NULL OR learner_step > step_before"""

# Code of a finding -> a query for (kind of subject, its id, detail). A catalog may be a stranger's,
# with any rows and without any index that has a name. So no query may take the square of its size:
# a join is by a primary key, or with a materialized table, for which SQLite makes an index.
RULES = {
    "segment_name": """
        SELECT 'segment', segment_id, format('its path is %s, which is another file''s', path)
        FROM segment
        WHERE substr(path, -length('/' || segment_id || '.parquet'))
            <> '/' || segment_id || '.parquet'""",
    "epoch": """
        SELECT 'epoch', m.epoch,
               format('%s is of epoch %d: workers of an older owner would not be refused',
                      t.kind, t.epoch)
        FROM meta m, (SELECT 'a segment' AS kind, max(epoch) AS epoch FROM segment
                      UNION ALL SELECT 'a batch', max(epoch) FROM batch
                      UNION ALL SELECT 'a version', max(epoch) FROM version) t
        WHERE t.epoch > m.epoch""",
    # SQLite gives no number beyond its largest one, and says that the disk is full.
    "counter": f"""
        WITH counter AS (
            SELECT 'epoch' AS name, epoch AS number FROM meta
            UNION ALL SELECT 'lsn', lsn FROM meta
            UNION ALL SELECT 'horizon_lsn', horizon_lsn FROM meta
            UNION ALL SELECT 'batch_id', max(batch_id) FROM batch
            UNION ALL SELECT 'event_id', max(event_id) FROM event
            UNION ALL SELECT 'unfinished_id', max(unfinished_id) FROM unfinished
            UNION ALL SELECT 'seq of group_state', max(seq) FROM group_state
            UNION ALL SELECT 'sqlite_sequence of ' || name, seq FROM sqlite_sequence)
        SELECT 'counter', name, format('it is at %s, and no run counts to it', number)
        FROM counter
        WHERE typeof(number) NOT IN ('integer', 'null')
            OR number NOT BETWEEN 0 AND {LARGEST_COUNTER}""",
    "group_sums": f"""
        SELECT 'group', g.group_uid,
               format('it has %d members, %d steps, %d won, return %!.17g, versions %s..%s; ',
                      g.n_members, g.n_steps, g.n_won, g.return_sum, g.version_min, g.version_max)
               || format('its trajectories sum to %d, %d, %d, %!.17g, %s..%s', coalesce(t.n, 0),
                         coalesce(t.steps, 0), coalesce(t.won, 0), coalesce(t.returns, 0),
                         t.oldest, t.newest)
        FROM grp g LEFT JOIN {_SUMS} t USING (group_uid) LEFT JOIN {_LOST} l USING (group_uid)
        WHERE CASE WHEN g.n_members = coalesce(t.n, 0) THEN
                g.n_steps <> coalesce(t.steps, 0) OR g.n_won <> coalesce(t.won, 0)
                OR abs(g.return_sum - coalesce(t.returns, 0)) > 1e-9 * (1 + abs(g.return_sum))
                OR g.version_min IS NOT t.oldest OR g.version_max IS NOT t.newest
            ELSE g.n_members <> coalesce(t.n, 0) + coalesce(l.n, 0)
                OR g.n_steps < coalesce(t.steps, 0) END""",
    "group_not_whole": """
        SELECT 'group', group_uid, format('it is %s with %d of %d members', state, n_members, size)
        FROM grp
        WHERE (split <> 'imported' OR source IS NOT NULL)
            AND (state = 'open' AND n_members >= size
            OR state IN ('stale', 'abandoned') AND n_members > size
            OR state NOT IN ('open', 'stale', 'abandoned') AND n_members <> size)""",
    "group_batch": """
        WITH live AS MATERIALIZED (SELECT * FROM batch_group WHERE live = 1)
        SELECT 'group', g.group_uid,
               format('it is %s, but batch %s has it as %s (%s)', g.state,
                      coalesce(b.batch_id, 'none'), coalesce(l.outcome, 'nothing'),
                      coalesce(b.state, 'no batch'))
        FROM grp g
        LEFT JOIN live l
            ON l.group_uid = g.group_uid AND (l.use = 1 OR g.source IS NOT NULL)
        LEFT JOIN batch b USING (batch_id)
        WHERE iif(g.source IS NULL,
            (g.state IN ('claimed', 'trained', 'filtered') OR l.live = 1)
            AND (b.state IS NOT iif(g.state = 'claimed', 'claimed', 'trained')
                 OR l.outcome IS NOT g.state
                    AND NOT (g.state = 'claimed' AND l.outcome = 'filtered')),
            l.live = 1 AND b.state IS NOT iif(l.outcome = 'claimed', 'claimed', 'trained'))""",
    "doubly_claimed": """
        SELECT 'group', group_uid, 'it counts in the batches ' || group_concat(batch_id)
        FROM batch_group JOIN grp USING (group_uid)
        WHERE live = 1 GROUP BY group_uid, use HAVING count(*) > 1""",
    "replayed_group": """
        SELECT 'group', g.group_uid,
               format('it is %s, and batch %d (%s) replays its wins', g.state, batch_id, b.state)
        FROM batch_group l JOIN grp g USING (group_uid) JOIN batch b USING (batch_id)
        WHERE live = 1 AND use > 1 AND source IS NULL
            AND (g.state <> 'trained' OR b.state = 'rolled_back')""",
    "batch_step": """
        SELECT 'batch', batch_id,
               format('it is %s with learner step %s at version %s', state,
                      coalesce(learner_step, 'none'), coalesce(version_in, 'none'))
        FROM batch
        WHERE state = 'trained'
                AND (learner_step IS NULL OR version_in IS NULL OR trained_lsn IS NULL)
            OR state = 'claimed' AND learner_step IS NOT NULL""",
    "ledger": """
        SELECT 'group', g.group_uid,
               format('it is %s, its newest line in the ledger says %s', g.state,
                      coalesce(s.state, 'nothing'))
        FROM grp g
        LEFT JOIN (SELECT group_uid, state, max(seq) FROM group_state GROUP BY group_uid) s
            USING (group_uid)
        WHERE s.state IS NOT g.state""",
    "drawn_by": f"""
        WITH events AS (
            SELECT opened_lsn AS lsn, 0 AS is_first, group_uid, split, weight, weighed_lsn
            FROM grp WHERE coalesce(weight, success_before, weighed_lsn) IS NOT NULL
            UNION ALL
            SELECT lsn, 1, NULL, NULL, NULL, NULL FROM ({_FIRST_PUBLISHED})),
        known AS (
            SELECT *, max(lsn) FILTER (WHERE is_first) OVER (
                ORDER BY lsn, is_first ROWS UNBOUNDED PRECEDING) AS known_lsn
            FROM events)
        SELECT 'group', group_uid,
               format('it is of split %s, with weight %s of lsn %s; it was opened at lsn %d',
                      split, coalesce(weight, 'none'), coalesce(weighed_lsn, 'none'), lsn)
        FROM known
        WHERE NOT is_first
            AND (split <> 'train' OR weight IS NULL OR NOT weight >= 0
                 OR (weighed_lsn = known_lsn) IS NOT TRUE)""",
    # Groups of a task that lost trajectories may have been completed again, later and with other
    # results.
    "success_before": """
        WITH events AS (
            SELECT group_uid, task_id, completed_lsn AS lsn, 0 AS is_draw, ordinal,
                   n_won * 1.0 / size AS success
            FROM grp WHERE split = 'train' AND completed_lsn IS NOT NULL
            UNION ALL
            SELECT group_uid, task_id, weighed_lsn, 1, ordinal, success_before
            FROM grp WHERE weighed_lsn IS NOT NULL),
        numbered AS (
            SELECT *, count(*) FILTER (WHERE NOT is_draw) OVER (
                PARTITION BY task_id ORDER BY lsn, is_draw, ordinal, group_uid
                ROWS UNBOUNDED PRECEDING) AS n_results
            FROM events),
        compared AS (  -- each number has one result
            SELECT *, max(success) FILTER (WHERE NOT is_draw) OVER (
                PARTITION BY task_id, n_results) AS result
            FROM numbered)
        SELECT 'group', group_uid,
               format('its task was drawn after a success of %s, and the result before is %s',
                      coalesce(success, 'none'), coalesce(result, 'none'))
        FROM compared
        WHERE is_draw AND success IS NOT result
            AND task_id NOT IN (
                SELECT task_id FROM lost_trajectory JOIN grp USING (group_uid))""",
    "critic_value": """
        SELECT 'batch', v.batch_id,
               format('it has values of trajectory %s that are not one for each step of its groups',
                      lower(hex(v.traj_uid)))
        FROM critic_value v LEFT JOIN trajectory t USING (traj_uid)
        WHERE v.traj_uid NOT IN (SELECT traj_uid FROM lost_trajectory)
            AND (iif(json_valid(v.state_values), json_array_length(v.state_values), -1)
                    IS NOT t.n_steps
                 OR NOT EXISTS (SELECT 1 FROM batch_group l WHERE l.batch_id = v.batch_id
                                AND l.group_uid = t.group_uid))""",
    "log_damaged": f"SELECT 'event', event_id, detail {FROM_OPEN_EVENTS}",
    # A run that publishes no weights through the store has no versions to compare with.
    "unknown_version": """
        WITH trained_group AS MATERIALIZED (
            SELECT group_uid, min(b.learner_step) AS learner_step
            FROM batch_group JOIN grp g USING (group_uid) JOIN batch b USING (batch_id)
            WHERE b.state = 'trained' AND g.source IS NULL GROUP BY group_uid),
        trained AS MATERIALIZED (
            SELECT t.version_min, t.version_max, g.learner_step
            FROM trajectory t CROSS JOIN trained_group g USING (group_uid))
        SELECT 'version', v.version,
               format('learner step %s trained on what it sampled, and it was never published',
                      min(v.learner_step))
        FROM (SELECT version_min AS version, learner_step FROM trained
              UNION SELECT version_max, learner_step FROM trained) v
        WHERE v.version NOT IN (SELECT version FROM version) AND EXISTS (SELECT 1 FROM version)
        GROUP BY v.version""",
}


@contextmanager
def open_catalog(layout: RunLayout) -> Iterator[sqlite3.Connection]:
    """Give a connection that can only read, beside an owner."""
    with opened_read_only(layout) as connection:
        connection.row_factory = sqlite3.Row
        yield connection


def check_identity(connection: sqlite3.Connection, layout: RunLayout) -> list[Finding]:
    """Check that this is a whole SQLite file, and this run's."""
    name = layout.catalog.name
    damage = _damage(connection) or _broken_texts(connection, at_most=MAX_LINES)
    if damage:
        return [found("catalog_damaged", name, "; ".join(damage[:MAX_LINES]))]
    meta = connection.execute("SELECT run_id FROM meta").fetchone()
    if meta is None:
        return [found("catalog_damaged", name, "it does not say which run it is of")]
    (run_id,) = meta
    if run_id != layout.info.run_id:
        detail = f"it belongs to run {run_id!s:.80}, run.json says {layout.info.run_id}"
        return [found("catalog_foreign", name, detail)]
    return []


@cache
def _columns(which: str) -> tuple[tuple[str, str], ...]:
    """Return (table, column) of the schema's columns for which a condition holds, in order."""
    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(SCHEMA)
        columns = database.execute(
            f"""SELECT t.name, c.name FROM sqlite_schema t, pragma_table_info(t.name) c
                WHERE t.type = 'table' AND {which} ORDER BY 1, 2"""
        )
        return tuple(columns)


@cache
def _future_lsn() -> str:
    """Return the query for rows that are later than the catalog, in any column with an lsn."""
    columns = _columns("c.name LIKE '%lsn'")
    spans = [
        f"SELECT '{table}.{lsn}' AS kind, min({lsn}) AS first, max({lsn}) AS last FROM {table}"
        for table, lsn in columns
    ]
    return f"""
        SELECT t.kind, iif(t.first < 0, t.first, t.last),
               format('the catalog is at lsn %d; readers do not see it', m.lsn)
        FROM ({" UNION ALL ".join(spans)}) t, meta m
        WHERE t.last > m.lsn OR t.first < 0"""


def check_catalog(connection: sqlite3.Connection) -> list[Finding]:
    """Check every rule on a whole catalog."""
    rows = connection.execute("PRAGMA foreign_key_check")
    findings = list(_shown("foreign_key", map(_broken_reference, rows)))
    for what, query in {**RULES, "future_lsn": _future_lsn()}.items():
        findings += _shown(what, map(_subject_and_detail, connection.execute(query)))
    return findings


def _broken_reference(row: sqlite3.Row) -> tuple[str, str]:
    table, rowid, parent, _ = row
    subject = f"{table} row {rowid}" if rowid is not None else table
    return subject, f"it refers to a row of {parent} that does not exist"


def _subject_and_detail(row: sqlite3.Row) -> tuple[str, str]:
    kind, subject, detail = row
    name = uid_text(subject) if isinstance(subject, bytes) else subject
    return f"{kind} {name}", detail


def _shown(what: str, rows: Iterator[tuple[str, str]]) -> Iterator[Finding]:
    """Yield the findings of one rule, of more than MAX_FINDINGS only the number of the others."""
    at_most = None if what in REPAIRED_RULES else MAX_FINDINGS
    for subject, detail in islice(rows, at_most):
        yield found(what, subject, detail)
    if n_others := sum(1 for _ in rows):
        yield found(what, "others", f"the same of {counted(n_others, 'other row')}")


def _damage(connection: sqlite3.Connection) -> list[str]:
    """Return SQLite's lines about a damaged file.

    Release 3.40 reports NULLs that are not there in tables without a rowid, so each is looked for.
    """
    lines = _integrity(connection, at_most=MAX_LINES)
    # All other lines come from counting rows. If pages share their children, that never ends.
    has_sound_pages = not any(line.startswith(DAMAGED_PAGES) for line in lines)
    if has_sound_pages and any(map(NULL_LINE.fullmatch, lines)):
        lines = _integrity(connection, at_most=ALL_LINES)
    damage = []
    for line in lines:
        match = NULL_LINE.fullmatch(line)
        if match is None:
            damage.append(line)
        elif has_sound_pages:
            table, column = match.groups()
            if connection.execute(f"SELECT 1 FROM {table} WHERE {column} IS NULL").fetchone():
                damage.append(line)
    return damage


def _broken_texts(connection: sqlite3.Connection, *, at_most: int) -> list[str]:
    """Return lines about texts that are no UTF-8: SQLite keeps any bytes, and Python reads none.

    One flipped bit makes such a text.
    """
    lines: list[str] = []
    before, connection.text_factory = connection.text_factory, bytes
    try:
        for table, of_table in groupby(_columns("c.type = 'TEXT'"), itemgetter(0)):
            columns = [column for _, column in of_table]
            cursor = connection.execute(f"SELECT {', '.join(columns)} FROM {table}")
            while len(lines) < at_most and (rows := cursor.fetchmany(ROWS_AT_ONCE)):
                texts = [text for row in rows for text in row if isinstance(text, bytes)]
                if not _is_text(b"\0".join(texts)):
                    lines += [
                        f"{table}.{name} has a text that is no UTF-8: {text!r:.80}"
                        for row in rows
                        for name, text in zip(columns, row, strict=True)
                        if isinstance(text, bytes) and not _is_text(text)
                    ]
    finally:
        connection.text_factory = before
    return lines[:at_most]


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _integrity(connection: sqlite3.Connection, *, at_most: int) -> list[str]:
    rows = connection.execute(f"PRAGMA integrity_check({at_most})")
    return list(dict.fromkeys(line for (line,) in rows if line != "ok"))
