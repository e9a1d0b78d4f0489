-- Turn-level PPO (arXiv 2512.17008): the estimate of gae.sql, whitened over the steps of the batch,
--   A <- (A - mean(A)) / sqrt(var(A) + 1e-8),  ddof 1.
-- A penalty is subtracted from the row of an invalid action before that. It is in no value and in
-- no target of one, as it is in no return. All equal, or a single step: exactly 0. The sums read no
-- anchor group, so their last bits do not depend on `anchor`. For turn_ppo only.
-- in:  step_advantage (for its other columns), gae, base; estimator, invalid_penalty
-- out: step_advantage's columns, with the whitened estimate for step_advantage; value_target DOUBLE
WITH estimates AS MATERIALIZED (
    SELECT
        gae.traj_uid,
        gae.step_index,
        gae - CASE WHEN is_action_valid THEN 0 ELSE invalid_penalty::DOUBLE END AS estimate,
        value_target
    FROM gae
    JOIN base ON gae.traj_uid = base.traj_uid AND gae.step_index = base.step_index
    WHERE estimator = 'turn_ppo'
),
batch AS (
    SELECT
        AVG(estimate) AS mean,
        VAR_SAMP(estimate) AS variance,
        MIN(estimate) = MAX(estimate) AS is_constant
    FROM estimates
),
whitened AS (
    SELECT
        traj_uid,
        step_index,
        value_target,
        CASE WHEN is_constant THEN 0 ELSE (estimate - mean) / SQRT(variance + 1e-8::DOUBLE)
        END AS advantage
    FROM estimates
    CROSS JOIN batch
)
SELECT
    step_advantage.* REPLACE (whitened.advantage AS step_advantage),
    whitened.value_target
FROM step_advantage
JOIN whitened
    ON step_advantage.traj_uid = whitened.traj_uid
    AND step_advantage.step_index = whitened.step_index
