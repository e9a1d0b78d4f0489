-- Length T of every trajectory. A trajectory that the recursion of eq. 5 would get wrong silently
-- is refused: a gap in step_index drops the steps before it, a duplicate multiplies them.
-- T rows from 0 to T-1 may still have one index twice and lack another; the recursion then ends
-- before step 0, and episodes.sql refuses. (COUNT(DISTINCT step_index) would see it here, but takes
-- as long as the whole recursion.)
-- rounding: the largest distance of a return (discounted or not) from the exact one, in any order
-- of addition. Each of T rewards was rounded once and takes part in at most 2 T - 1 rounded
-- operations, so
--   |R - R exact| <= 2 T u sum |r| + O(u^2),  u = 2^-53 the unit roundoff; T + 1 covers O(u^2).
-- won: true in one row is enough. Rewards are finite, and so must be their sums and sums of
-- squares; the bound 1e100 leaves room for both.
-- in:  base
-- out: traj_uid, group_uid, n_steps BIGINT, n_invalid BIGINT, rounding DOUBLE, won BOOLEAN
SELECT
    traj_uid,
    ANY_VALUE(group_uid) AS group_uid,
    CASE
        WHEN COUNT(*) FILTER (
            traj_uid IS NULL OR group_uid IS NULL OR step_index IS NULL OR is_action_valid IS NULL
            OR reward IS NULL OR NOT isfinite(reward)
        ) > 0
            THEN error(format(
                'trajectory {} has a NULL uid, step_index or is_action_valid, or a reward that is '
                || 'not finite',
                COALESCE(traj_uid::VARCHAR, 'NULL')))
        WHEN SUM(abs(reward)) > 1e100
            THEN error(format('trajectory {} has rewards whose sizes add up to {}; '
                || 'scale them, to at most 1e100',
                traj_uid::VARCHAR, SUM(abs(reward))))
        WHEN MIN(group_uid) <> MAX(group_uid)
            THEN error(format(
                'trajectory {} is in more than one group; give it one group_uid',
                traj_uid::VARCHAR))
        WHEN MIN(step_index) = 0 AND MAX(step_index) < COUNT(*) - 1
            THEN error(format(
                'trajectory {} has a step_index twice; store each step once', traj_uid::VARCHAR))
        WHEN MIN(step_index) <> 0 OR MAX(step_index) > COUNT(*) - 1
            THEN error(format(
                'trajectory {} has {} steps with step_index {} to {}; it must count 0, 1, 2, ... '
                || 'without a gap',
                traj_uid::VARCHAR, COUNT(*), MIN(step_index), MAX(step_index)))
        ELSE COUNT(*)
    END AS n_steps,
    COUNT(*) FILTER (NOT is_action_valid) AS n_invalid,
    (COUNT(*) + 1) * SUM(abs(reward)) * 2::DOUBLE ** -52 AS rounding,
    BOOL_OR(won) AS won
FROM base
GROUP BY traj_uid
