-- Statistics of the scores of one group (one task), eq. 3: mean and standard deviation (ddof 1).
--   mean = sum(u x) / n,   var = sum(u (x - mean)^2) / (n - 1),   u = units,   n = sum(u)
-- For gigpo/group_filter.py: episode returns (no penalty) differ if they are further apart than
-- rounding can put them; one lone trajectory differs from nothing.
-- Scores are kept as two lists, because reading `episodes` again for the deviation would take a
-- second aggregate and two joins.
-- in:  episodes; weighting, invalid_penalty
-- out: group_uid, n DOUBLE (rows or trajectories), mean DOUBLE, deviation DOUBLE (NULL for n = 1),
--      all_equal BOOLEAN, rounding DOUBLE (returns of the group this close may be the same),
--      episodes_differ BOOLEAN, has_penalties BOOLEAN (a row has a penalty)
SELECT
    * EXCLUDE (all_units, scores),
    SQRT(list_sum(list_transform(
        list_zip(all_units, scores), lambda line: line[1] * (line[2] - mean) ** 2
    )) / NULLIF(n - 1, 0)) AS deviation
FROM (
    SELECT
        * EXCLUDE (n_steps, n_trajectories, total),
        CASE weighting WHEN 'steps' THEN n_steps ELSE n_trajectories END AS n,
        total / n AS mean
    FROM (
        SELECT
            group_uid,
            LIST(units) AS all_units,
            LIST(score) AS scores,
            SUM(units) AS n_steps,
            -- counted, because the units of one trajectory may not add up to exactly 1
            SUM(is_counted)::DOUBLE AS n_trajectories,
            SUM(units * score) AS total,
            MIN(score) = MAX(score) AS all_equal,
            2 * MAX(rounding) AS rounding,
            MAX(episode_return) - MIN(episode_return) > 2 * MAX(rounding) AS episodes_differ,
            BOOL_OR(NOT is_action_valid AND invalid_penalty::DOUBLE > 0) AS has_penalties
        FROM episodes
        GROUP BY group_uid
    )
)
