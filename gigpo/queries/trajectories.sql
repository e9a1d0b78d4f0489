-- Length T of every trajectory, and the refusal of one that the recursion of eq. 5 would get wrong without saying so:
-- a gap in step_index drops the steps before it, a duplicate multiplies them.
-- T rows from 0 to T-1 may still hold one index twice and lack another; there the recursion ends before step 0, and
-- episodes.sql refuses. (COUNT(DISTINCT step_index) would see it here, for as much time as the whole recursion takes.)
-- rounding: how far a return (discounted or not) can be from that of the rewards as they were meant, in any order of
-- addition: each of T rewards was rounded once and then takes part in at most 2 T - 1 rounded operations, so
--   |R - R exact| <= 2 T u sum |r| + O(u^2),  u = 2^-53 the unit roundoff; T + 1 instead of T is for O(u^2).
-- won: some row says so. Whoever writes it in the last row only, false in those before, means the same.
-- Rewards are finite and so must be what is made of them: sums, and sums of squares. 1e100 leaves room for both.
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
                'trajectory {} has a NULL uid, step_index or is_action_valid, or a reward that is not finite',
                COALESCE(traj_uid::VARCHAR, 'NULL')))
        WHEN SUM(abs(reward)) > 1e100
            THEN error(format('trajectory {} has rewards whose sizes add up to {}; scale them, to at most 1e100',
                traj_uid::VARCHAR, SUM(abs(reward))))
        WHEN MIN(group_uid) <> MAX(group_uid)
            THEN error(format('trajectory {} is in more than one group; give it one group_uid', traj_uid::VARCHAR))
        WHEN MIN(step_index) = 0 AND MAX(step_index) < COUNT(*) - 1
            THEN error(format('trajectory {} has a step_index twice; store each step once', traj_uid::VARCHAR))
        WHEN MIN(step_index) <> 0 OR MAX(step_index) > COUNT(*) - 1
            THEN error(format(
                'trajectory {} has {} steps with step_index {} to {}; it must count 0, 1, 2, ... without a gap',
                traj_uid::VARCHAR, COUNT(*), MIN(step_index), MAX(step_index)))
        ELSE COUNT(*)
    END AS n_steps,
    COUNT(*) FILTER (NOT is_action_valid) AS n_invalid,
    (COUNT(*) + 1) * SUM(abs(reward)) * 2::DOUBLE ** -52 AS rounding,
    BOOL_OR(won) AS won
FROM base
GROUP BY traj_uid
