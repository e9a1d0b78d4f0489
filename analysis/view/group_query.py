"""Ask for the steps of one group, or of the last batches, without scanning the others.

A group is a few hundred steps of maybe millions. Its versions stand in the small table `groups`,
and every Parquet file says which versions each of its parts holds. So a query that names the
versions too reads the parts of about that time only.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.view.page import PageRequest
from analysis.view.sql_text import fill

# `steps` of this group only, also for the macro advantages(): it reads the nearest `steps`.
OF_GROUP = """
FROM steps WHERE group_uid = $group{versions}
"""
# The same for the groups of the last `$steps` batches.
OF_BATCHES = """
SELECT s.* EXCLUDE (prompt_ids, response_ids, response_logprobs, images) FROM steps AS s SEMI JOIN (
    SELECT DISTINCT group_uid FROM lineage
    WHERE batch_state = 'trained' AND live
      AND learner_step > (
          SELECT max(learner_step) FROM lineage WHERE batch_state = 'trained') - $steps)
    USING (group_uid) WHERE TRUE{versions}
"""
# Their terms. A table of its own: where the macro refuses, the steps are shown all the same.
TERMS = ("terms", "FROM advantages()")
# The newest group of mixed outcome, or else the newest one.
NEWEST_GROUP = """
SELECT group_uid FROM groups WHERE state = 'trained'
ORDER BY n_won BETWEEN 1 AND n_members - 1 DESC, completed_at DESC LIMIT 1
"""
VERSIONS = """
SELECT version_min AS oldest, version_max AS newest FROM groups WHERE group_uid = $group
"""
BATCHES_VERSIONS = """
SELECT min(g.version_min) AS oldest, max(g.version_max) AS newest
FROM groups AS g JOIN lineage AS l USING (group_uid)
WHERE batch_state = 'trained' AND live
  AND learner_step > (SELECT max(learner_step) FROM lineage WHERE batch_state = 'trained') - $steps
"""


def group_versions(asked: PageRequest, group: uuid.UUID) -> str:
    """Return the condition on versions that spares most of the files."""
    return _between(asked.rows(fill(VERSIONS, group=group)))


def group_steps(asked: PageRequest, group: uuid.UUID) -> tuple[str, str]:
    """Return the table `steps` of one group, for `Panel.tables`."""
    return "steps", fill(OF_GROUP.replace("{versions}", group_versions(asked, group)), group=group)


def batches_steps(asked: PageRequest, n_steps: int) -> tuple[str, str]:
    """Return the table `steps` of the groups of the last `n_steps` learner steps."""
    # DuckDB leaves out files by numbers that stand in the query, not by those of a subquery.
    versions = _between(asked.rows(fill(BATCHES_VERSIONS, steps=n_steps)))
    return "steps", fill(OF_BATCHES.replace("{versions}", versions), steps=n_steps)


def _between(found: Sequence[Mapping[str, Any]]) -> str:
    if not found or found[0]["oldest"] is None:
        return ""
    return fill(
        " AND version_min >= $oldest AND version_max <= $newest",
        oldest=found[0]["oldest"],
        newest=found[0]["newest"],
    )
