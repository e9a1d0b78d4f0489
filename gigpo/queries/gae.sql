-- Generalised advantage estimation (arXiv 1506.02438) over the node values, or over a critic's:
--   A_t = delta_t + gamma lambda A_{t+1},  0 past the end,
--   delta_t = r_t + gamma V(s_{t+1}) - V(s_t)
-- A_t + V(s_t) is the lambda-return, which a critic learns. The recursion goes back from each
-- trajectory's last step, as in returns.sql. For gagpo and turn_ppo only.
-- in:  node_values, critic_values; estimator, gamma, gae_lambda
-- out: traj_uid, step_index, gae DOUBLE, value_target DOUBLE (A_t + V(s_t))
WITH RECURSIVE errors AS MATERIALIZED (
    SELECT
        traj_uid,
        step_index,
        state_value,
        reward + gamma::DOUBLE * next_value - state_value AS delta,
        is_last
    FROM (
        SELECT traj_uid, step_index, reward, node_value AS state_value, next_value, is_last
        FROM node_values
        WHERE estimator = 'gagpo'
        UNION ALL BY NAME
        FROM critic_values
        WHERE estimator = 'turn_ppo'
    )
),
backwards AS (
    SELECT traj_uid, step_index, state_value, delta AS gae FROM errors WHERE is_last
    UNION ALL
    SELECT
        errors.traj_uid,
        errors.step_index,
        errors.state_value,
        errors.delta + gamma::DOUBLE * gae_lambda::DOUBLE * later.gae AS gae
    FROM backwards AS later
    JOIN errors ON errors.traj_uid = later.traj_uid AND errors.step_index = later.step_index - 1
)
SELECT traj_uid, step_index, gae, gae + state_value AS value_target
FROM backwards
