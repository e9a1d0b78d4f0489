-- A critic's value of the state that each step was taken in, and of the state that it led to:
--   V(s_T) = 0 past the last step, also after a truncation, as in returns.sql.
-- The values come with the steps, because they are a network's. For turn_ppo and
-- ppo only.
-- in:  base, trajectories; estimator
-- out: traj_uid, step_index, reward, state_value DOUBLE, next_value DOUBLE, is_last BOOLEAN
SELECT
    base.traj_uid,
    base.step_index,
    base.reward,
    CASE WHEN isfinite(base.value) THEN base.value ELSE error(format(
        '{} needs a finite value of every step, by a critic; trajectory {} step {} has {}; '
        || 'give `steps` a column value',
        estimator, base.traj_uid::VARCHAR, base.step_index,
        COALESCE(base.value::VARCHAR, 'NULL')))
    END AS state_value,
    COALESCE(later.value, 0) AS next_value,
    base.step_index = n_steps - 1 AS is_last
FROM base
JOIN trajectories ON base.traj_uid = trajectories.traj_uid
LEFT JOIN base AS later
    ON base.traj_uid = later.traj_uid AND base.step_index + 1 = later.step_index
WHERE estimator IN ('turn_ppo', 'ppo')
