-- Step advantage, eq. 7:  A_S = (R_t - baseline) / F  over the anchor group, by `normalise`: mean, mean_std (deviation +
-- 1e-6) or leave_one_out (the mean of the other members), as in episode_advantage.sql.
-- The deviation has ddof 1, as GiGPO's authors compute it; ddof 0 for hgpo, as its authors do.
-- One step alone, or returns that are all equal: exactly 0. (A float32 mean misses by one ulp, and one ulp divided by
-- one ulp + 1e-6 is up to 0.65: the fault this comparison, and DOUBLE throughout, are here for.)
-- in:  anchor_keys (for its rows), anchor_groups; estimator, normalise, versions
-- out: anchor_keys' columns, step_advantage DOUBLE, anchor_size BIGINT (1 = alone)
SELECT
    anchor_keys.*,
    COALESCE(anchor_size, 1) AS anchor_size,
    CASE
        WHEN COALESCE(all_equal, true) THEN 0::DOUBLE
        WHEN normalise = 'mean_std'
            THEN (step_return - mean) / (CASE estimator WHEN 'hgpo' THEN deviation_0 ELSE deviation END + 1e-6::DOUBLE)
        WHEN normalise = 'leave_one_out' THEN (step_return - mean) * total_weight
            / (total_weight - CASE versions WHEN 'weighted' THEN weight / max_weight ELSE 1 END)
        ELSE step_return - mean
    END AS step_advantage
FROM anchor_keys
LEFT JOIN anchor_groups
    ON anchor_keys.group_uid = anchor_groups.group_uid
    AND anchor_keys.state_key IS NOT DISTINCT FROM anchor_groups.state_key
    AND anchor_keys.refinement = anchor_groups.refinement
    AND anchor_keys.version_bucket = anchor_groups.version_bucket
