-- Generalised advantage estimation (arXiv 1506.02438, written as a recursion) over the node values,
-- or over a critic's:
--   A_t = delta_t + gamma lambda A_{t+1},  0 past the end,
--   delta_t = r_t + gamma V(s_{t+1}) - V(s_t),  V = 0 past the end, also after a truncation
-- A_t + V(s_t) is the lambda-return, which a critic learns. The recursion goes back from each
-- trajectory's last step, as in returns.sql. For gagpo and turn_ppo only.
-- in:  node_values, critic_values, trajectories; estimator, gamma, gae_lambda
-- out: traj_uid, step_index, is_action_valid, gae DOUBLE, value_target DOUBLE (A_t + V(s_t))
WITH RECURSIVE valued AS MATERIALIZED (
    SELECT traj_uid, step_index, is_action_valid, reward, node_value AS state_value, is_last
    FROM node_values
    WHERE estimator = 'gagpo'
    UNION ALL BY NAME
    SELECT critic_values.*, critic_values.step_index = n_steps - 1 AS is_last
    FROM critic_values
    JOIN trajectories ON critic_values.traj_uid = trajectories.traj_uid
    WHERE estimator = 'turn_ppo'
),
backwards AS (
    SELECT * EXCLUDE (is_last), reward - state_value AS gae FROM valued WHERE is_last
    UNION ALL
    SELECT
        valued.* EXCLUDE (is_last),
        valued.reward + gamma::DOUBLE * later.state_value - valued.state_value
            + gamma::DOUBLE * gae_lambda::DOUBLE * later.gae AS gae
    FROM backwards AS later
    JOIN valued ON valued.traj_uid = later.traj_uid AND valued.step_index = later.step_index - 1
)
SELECT traj_uid, step_index, is_action_valid, gae, gae + state_value AS value_target
FROM backwards
