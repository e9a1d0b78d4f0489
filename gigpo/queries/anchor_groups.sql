-- Anchor groups, eq. 6: the steps of one group that were taken in the same state, whoever took them and when (a state
-- met twice in one trajectory counts twice), with the statistics eq. 7 needs. Never across groups.
-- A step without a state hash belongs to none of them: it is its own singleton, not one of a crowd of unknowns.
-- in:  scores
-- out: group_uid, state_hash, anchor_size BIGINT, mean DOUBLE, deviation DOUBLE (ddof 1, NULL for one step),
--      all_equal BOOLEAN
SELECT
    group_uid,
    state_hash,
    COUNT(*) AS anchor_size,
    AVG(step_return) AS mean,
    STDDEV_SAMP(step_return) AS deviation,
    MIN(step_return) = MAX(step_return) AS all_equal
FROM scores
WHERE state_hash IS NOT NULL
GROUP BY group_uid, state_hash
