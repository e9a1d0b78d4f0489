-- Generalised advantage estimation (arXiv 1506.02438) over the node values:
--   A_t = delta_t + gamma lambda A_{t+1},  0 past the end,
--   delta_t = r_t + gamma V(s_{t+1}) - V(s_t)
-- The recursion goes back from each trajectory's last step, as in returns.sql. For gagpo only.
-- in:  node_values; estimator, gamma, gae_lambda
-- out: traj_uid, step_index, gae DOUBLE
WITH RECURSIVE errors AS MATERIALIZED (
    SELECT
        traj_uid,
        step_index,
        reward + gamma::DOUBLE * next_value - node_value AS delta,
        is_last
    FROM node_values
    WHERE estimator = 'gagpo'
),
backwards AS (
    SELECT traj_uid, step_index, delta AS gae FROM errors WHERE is_last
    UNION ALL
    SELECT
        errors.traj_uid,
        errors.step_index,
        errors.delta + gamma::DOUBLE * gae_lambda::DOUBLE * later.gae AS gae
    FROM backwards AS later
    JOIN errors ON errors.traj_uid = later.traj_uid AND errors.step_index = later.step_index - 1
)
FROM backwards
