-- Choose groups whose wins are trained on again: trained on before, won by some of their episodes
-- and not by all, young enough, with all their rows. The least used come first, then the newest.
-- in:  :oldest_version, :n_groups, :first_use, which is 2: use 1 is the batch that trained on the
--      whole group. batches.py puts FREE_USE of imported_groups.py into the last line
-- out: the columns of grp, and `use`, the number of the group's next use
WITH chosen AS (
    SELECT g.*,
           (SELECT count(*) FROM batch_group l
            WHERE l.group_uid = g.group_uid AND l.live = 1) AS n_uses
    FROM grp g
    WHERE g.split = 'train' AND g.state = 'trained' AND g.version_min >= :oldest_version
        AND g.n_won BETWEEN 1 AND g.n_members - 1
        AND g.n_members = (
            SELECT count(*) FROM trajectory t JOIN segment s USING (segment_id)
            WHERE t.group_uid = g.group_uid AND s.retired_lsn IS NULL)
    ORDER BY n_uses, g.version_min DESC, g.ordinal DESC LIMIT :n_groups
)
SELECT *, {free_use} AS use FROM chosen c ORDER BY n_uses, version_min DESC, ordinal DESC
