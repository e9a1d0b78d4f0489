-- Anchor groups, eq. 6, with the statistics of eq. 7: the steps of one group with the same anchor
-- key, of any trajectory and step. A state met twice in one trajectory counts twice. Steps without
-- a key are in no anchor group.
-- in:  comparisons
-- out: group_uid, state_key, refinement, anchor_size BIGINT, max_weight DOUBLE, mean DOUBLE,
--      deviation DOUBLE (ddof 1, NULL for one step), deviation_0 DOUBLE (ddof 0),
--      all_equal BOOLEAN, spread DOUBLE (largest less smallest return, no penalty)
SELECT
    group_uid,
    state_key,
    refinement,
    COUNT(*) AS anchor_size,
    1::DOUBLE AS max_weight,
    AVG(step_return) AS mean,
    STDDEV_SAMP(step_return) AS deviation,
    STDDEV_POP(step_return) AS deviation_0,
    MAX(step_return) - MIN(step_return) <= MAX(tolerance) AS all_equal,
    CASE WHEN MAX(raw_return) - MIN(raw_return) > MAX(tolerance)
        THEN MAX(raw_return) - MIN(raw_return)
        ELSE 0
    END AS spread
FROM comparisons
WHERE refinement IS NOT NULL
GROUP BY group_uid, state_key, refinement
