-- What a trajectory is compared with, eq. 3: mean and standard deviation (ddof 1) of the scores of one group (one task).
--   mean = sum(u x) / n,   var = sum(u (x - mean)^2) / (n - 1),   u = units,   n = sum(u)
-- in:  episodes; weighting
-- out: group_uid, n DOUBLE (rows or trajectories), mean DOUBLE, deviation DOUBLE (NULL for n = 1), all_equal BOOLEAN
WITH sums AS (
    SELECT
        group_uid,
        SUM(units) AS n_steps,
        SUM(is_counted)::DOUBLE AS n_trajectories, -- counted: the units of one need not add up to exactly 1
        SUM(units * score) AS total,
        MIN(score) = MAX(score) AS all_equal
    FROM episodes
    GROUP BY group_uid
),
means AS (
    SELECT group_uid, CASE weighting WHEN 'steps' THEN n_steps ELSE n_trajectories END AS n, total / n AS mean, all_equal
    FROM sums
)
SELECT group_uid, n, mean, all_equal, SQRT(SUM(units * (score - mean) ** 2) / NULLIF(n - 1, 0)) AS deviation
FROM episodes
JOIN means USING (group_uid)
GROUP BY group_uid, n, mean, all_equal
