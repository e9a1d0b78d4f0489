-- A critic's value of the state that each step was taken in. The values come with the steps,
-- because they are a network's. For turn_ppo and ppo only.
-- in:  base; estimator
-- out: traj_uid, step_index, reward, is_action_valid, state_value DOUBLE
SELECT
    traj_uid,
    step_index,
    reward,
    is_action_valid,
    CASE WHEN isfinite(value) THEN value ELSE error(format(
        '{} needs a finite value of every step, by a critic; trajectory {} step {} has {}; '
        || 'give `steps` a column value',
        estimator, traj_uid::VARCHAR, step_index, COALESCE(value::VARCHAR, 'NULL')))
    END AS state_value
FROM base
WHERE estimator IN ('turn_ppo', 'ppo')
