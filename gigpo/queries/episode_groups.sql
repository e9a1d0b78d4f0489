-- What a trajectory is compared with, eq. 3: mean and standard deviation (ddof 1) of the scores of one group (one task).
--   mean = sum(u x) / n,   var = sum(u (x - mean)^2) / (n - 1),   u = units,   n = sum(u)
-- And whether there is anything to learn from, see gigpo/signal.py: episode returns (no penalty) differ if they are further
-- apart than rounding can put them; one lone trajectory differs from nothing.
-- in:  episodes; weighting, invalid_penalty
-- out: group_uid, n DOUBLE (rows or trajectories), mean DOUBLE, deviation DOUBLE (NULL for n = 1), all_equal BOOLEAN,
--      rounding DOUBLE (two returns of the group this close may be the same), episodes_differ BOOLEAN,
--      has_penalties BOOLEAN (some row has lost a penalty)
WITH sums AS (
    SELECT
        group_uid,
        SUM(units) AS n_steps,
        SUM(is_counted)::DOUBLE AS n_trajectories, -- counted: the units of one need not add up to exactly 1
        SUM(units * score) AS total,
        MIN(score) = MAX(score) AS all_equal,
        2 * MAX(rounding) AS rounding,
        MAX(episode_return) - MIN(episode_return) > 2 * MAX(rounding) AS episodes_differ,
        BOOL_OR(NOT is_action_valid AND invalid_penalty::DOUBLE > 0) AS has_penalties
    FROM episodes
    GROUP BY group_uid
),
means AS (
    SELECT
        * EXCLUDE (n_steps, n_trajectories, total),
        CASE weighting WHEN 'steps' THEN n_steps ELSE n_trajectories END AS n,
        total / n AS mean
    FROM sums
)
SELECT
    group_uid,
    ANY_VALUE(means.n) AS n,
    ANY_VALUE(means.mean) AS mean,
    ANY_VALUE(all_equal) AS all_equal,
    ANY_VALUE(means.rounding) AS rounding,
    ANY_VALUE(episodes_differ) AS episodes_differ,
    ANY_VALUE(has_penalties) AS has_penalties,
    SQRT(SUM(units * (score - means.mean) ** 2) / NULLIF(ANY_VALUE(means.n) - 1, 0)) AS deviation
FROM episodes
JOIN means USING (group_uid)
GROUP BY group_uid
