-- Turn-level PPO (arXiv 2512.17008): the estimate of gae.sql, whitened over the steps of the batch,
--   A <- (A - mean(A)) / sqrt(var(A) + 1e-8),  ddof 1.
-- A penalty is subtracted from the row of an invalid action before that. It is in no value and in
-- no target of one, as it is in no return. All equal, or a single step: exactly 0. For turn_ppo
-- only.
-- in:  step_advantage (for its rows), gae; estimator, invalid_penalty
-- out: step_advantage's columns, with the whitened estimate for step_advantage; value_target DOUBLE
WITH estimates AS MATERIALIZED (
    SELECT
        step_advantage.*,
        gae - CASE WHEN is_action_valid THEN 0 ELSE invalid_penalty::DOUBLE END AS estimate,
        value_target
    FROM step_advantage
    JOIN gae
        ON step_advantage.traj_uid = gae.traj_uid AND step_advantage.step_index = gae.step_index
    WHERE estimator = 'turn_ppo'
),
batch AS (
    SELECT
        AVG(estimate) AS mean,
        VAR_SAMP(estimate) AS variance,
        MIN(estimate) = MAX(estimate) AS is_constant
    FROM estimates
)
SELECT
    estimates.* EXCLUDE (estimate) REPLACE (
        CASE WHEN is_constant THEN 0 ELSE (estimate - mean) / SQRT(variance + 1e-8::DOUBLE)
        END AS step_advantage
    )
FROM estimates
CROSS JOIN batch
