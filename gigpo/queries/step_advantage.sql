-- Step advantage, eq. 7:  A_S = (R_t - mean(R)) / F  over the anchor group; F as in eq. 3 (see episode_advantage.sql).
-- One step alone, or returns that are all equal: exactly 0. (A float32 mean misses by one ulp, and one ulp divided by
-- one ulp + 1e-6 is up to 0.65: the fault this comparison, and DOUBLE throughout, are here for.)
-- GRPO has no step term: its A_S reads 0, so eq. 8 stays as it is.
-- in:  episode_advantage (for its rows), anchor_groups; normalise, estimator
-- out: episode_advantage's columns, step_advantage DOUBLE, anchor_size BIGINT
SELECT
    episode_advantage.*,
    CASE
        WHEN estimator NOT IN ('gigpo', 'grpo')
            THEN error(format('estimator must be gigpo or grpo, not {}', estimator))
        WHEN estimator = 'grpo' OR COALESCE(all_equal, true) THEN 0::DOUBLE
        WHEN normalise = 'mean' THEN step_return - mean
        ELSE (step_return - mean) / (deviation + 1e-6::DOUBLE)
    END AS step_advantage,
    COALESCE(anchor_size, 1) AS anchor_size
FROM episode_advantage
LEFT JOIN anchor_groups USING (group_uid, state_hash)
