-- Recalibrated advantage of a replayed win (SPEAR, arXiv 2509.22601):  A = weight (x - m) / s.
-- In its own group a win was compared with an older policy. Here it is compared with what the
-- policy gets now, in the batch that it is replayed in:
--   x   the win's undiscounted return, less `invalid_penalty` in a row with an invalid action
--   m   median over the batch's groups of their mean return
--   s   1, or where `is_scaled` the median deviation (ddof 1) + 1e-6 of the groups whose returns
--       differ. Replayed groups count there, so that there is always one
-- A row with A <= 0 is left out: the policy does as well by now.
-- in:  batch (group_uid, traj_uid, step_index, reward), all groups of it;
--      replayed (the same, is_action_valid, won, replayed_row BIGINT), whole groups;
--      is_scaled, invalid_penalty, weight
-- out: replayed_row BIGINT, advantage DOUBLE, in the order of replayed_row
WITH episodes AS (
    SELECT group_uid, traj_uid, SUM(reward ORDER BY step_index) AS episode_return, false AS is_old
    FROM batch GROUP BY group_uid, traj_uid
    UNION ALL
    SELECT group_uid, traj_uid, SUM(reward ORDER BY step_index), true
    FROM replayed GROUP BY group_uid, traj_uid
),
returns_of_groups AS (
    SELECT
        is_old,
        AVG(episode_return ORDER BY traj_uid) AS mean,
        STDDEV_SAMP(episode_return ORDER BY traj_uid) AS deviation,
        -- more than the rounding of sums
        MAX(episode_return) - MIN(episode_return) > 1e-9 * MAX(abs(episode_return)) AS differs
    FROM episodes GROUP BY group_uid, is_old
),
baseline AS (
    SELECT
        MEDIAN(mean) FILTER (NOT is_old) AS m,
        CASE
            WHEN $is_scaled THEN MEDIAN(deviation) FILTER (differs) + 1e-6::DOUBLE
            ELSE 1
        END AS s
    FROM returns_of_groups
)
SELECT
    replayed_row,
    $weight::DOUBLE * (
        episode_return - CASE WHEN is_action_valid THEN 0 ELSE $invalid_penalty::DOUBLE END - m
    ) / s AS advantage
FROM replayed
JOIN episodes ON replayed.traj_uid = episodes.traj_uid AND episodes.is_old
CROSS JOIN baseline
WHERE won AND advantage > 0
ORDER BY replayed_row
