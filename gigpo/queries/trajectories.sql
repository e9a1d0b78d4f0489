-- Length T of every trajectory, and the refusal of one that the recursion of eq. 5 would get wrong without saying so:
-- a gap in step_index drops the steps before it, a duplicate multiplies them.
-- in:  base
-- out: traj_uid UUID, n_steps BIGINT
SELECT
    traj_uid,
    CASE
        WHEN COUNT(DISTINCT step_index) < COUNT(step_index)
            THEN error(format('trajectory {} has a step_index twice; store each step once', traj_uid::VARCHAR))
        WHEN MIN(step_index) <> 0 OR MAX(step_index) <> COUNT(*) - 1
            THEN error(format(
                'trajectory {} has {} steps with step_index {} to {}; it must count 0, 1, 2, ... without a gap',
                traj_uid::VARCHAR, COUNT(*), MIN(step_index), MAX(step_index)))
        WHEN MIN(group_uid) <> MAX(group_uid)
            THEN error(format('trajectory {} is in more than one group; give it one group_uid', traj_uid::VARCHAR))
        WHEN COUNT(step_index) < COUNT(*) OR COUNT(group_uid) < COUNT(*) OR COUNT(is_action_valid) < COUNT(*)
                OR COUNT(*) FILTER (isfinite(reward)) < COUNT(*)
            THEN error(format(
                'trajectory {} has a NULL group_uid, step_index or is_action_valid, or a reward that is not finite',
                traj_uid::VARCHAR))
        ELSE COUNT(*)
    END AS n_steps
FROM base
GROUP BY traj_uid
