-- Step advantage, eq. 7:  A_S = (R_t - baseline) / F  over the anchor group, by `normalise`: mean,
-- mean_std (deviation + 1e-6) or leave_one_out.
-- leave_one_out: the baseline is the mean over the steps of other trajectories. All steps of the
-- own trajectory are left out, because the returns of a state met twice share rewards; one
-- trajectory alone: 0. With d = R - mean and n members the mean of the others is
--   mean - sum_own(d) / (n - n_own).
-- With weights v the others are summed instead: if the own trajectory has nearly all the weight,
-- V - sum_own(v) would be rounding only.
-- The deviation has ddof 1 as in GiGPO's code, and ddof 0 for hgpo as in HGPO's.
-- One step alone, or equal returns: exactly 0. (A float32 mean misses by one ulp, and one ulp
-- divided by one ulp + 1e-6 is up to 0.65. This comparison and DOUBLE throughout prevent that.)
-- in:  comparisons (for its rows), anchor_groups, weighted_anchor_groups; estimator, normalise,
--      anchor_versions
-- out: comparisons' columns, anchor_size BIGINT (1 = alone),
--      spread DOUBLE (of returns without penalty; 0 = alone), step_advantage DOUBLE
WITH compared AS (
    SELECT
        comparisons.*,
        COALESCE(anchor_size, 1) AS anchor_size,
        COALESCE(spread, 0) AS spread,
        COALESCE(all_equal, true) AS all_equal,
        step_return - mean AS d,
        CASE estimator WHEN 'hgpo' THEN deviation_0 ELSE deviation END AS deviation,
        CASE anchor_versions WHEN 'weighted' THEN weight / max_weight ELSE 1 END AS v
    FROM comparisons
    LEFT JOIN (
        FROM anchor_groups WHERE anchor_versions <> 'weighted'
        UNION ALL BY NAME
        FROM weighted_anchor_groups WHERE anchor_versions = 'weighted'
    ) AS statistics
        ON comparisons.group_uid = statistics.group_uid
        AND comparisons.state_key IS NOT DISTINCT FROM statistics.state_key
        AND comparisons.refinement = statistics.refinement
)
SELECT
    *,
    CASE
        WHEN all_equal THEN 0::DOUBLE
        WHEN normalise = 'mean_std' THEN d / (deviation + 1e-6::DOUBLE)
        WHEN normalise = 'mean' THEN d
        WHEN COUNT(*) OVER own = anchor_size THEN 0
        WHEN anchor_versions = 'weighted'
            THEN step_return - SUM(v * step_return) OVER others / SUM(v) OVER others
        ELSE d + SUM(d) OVER own / (anchor_size - COUNT(*) OVER own)
    END AS step_advantage
FROM compared
WINDOW
    own AS (PARTITION BY group_uid, state_key, refinement, traj_uid),
    others AS (
        PARTITION BY group_uid, state_key, refinement
        ORDER BY traj_uid
        RANGE BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING EXCLUDE GROUP
    )
