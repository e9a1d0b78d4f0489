-- PPO with a critic. An estimate of each step, whitened over the steps of the batch:
--   A <- (A - mean(A)) / sqrt(var(A) + 1e-8),  ddof 1.
--   turn_ppo  the estimate of gae.sql (arXiv 2512.17008), less the penalty of an invalid action,
--             which is in no value and in no target of one, as it is in no return
--   ppo       the row's score (episodes.sql, penalty included), which is the target, less the value
--             of its first token: that token's estimate with lambda 1. token_advantages.py has
--             those of all tokens
-- All equal, or a single step: exactly 0. The sums read no anchor group, so their last bits do not
-- depend on `anchor`. For turn_ppo and ppo only.
-- in:  step_advantage (for its other columns), gae, critic_values, episodes, base; estimator,
--      invalid_penalty
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
    UNION ALL BY NAME
    SELECT
        critic_values.traj_uid,
        critic_values.step_index,
        score - state_value AS estimate,
        score AS value_target
    FROM critic_values
    JOIN base
        ON critic_values.traj_uid = base.traj_uid AND critic_values.step_index = base.step_index
    JOIN episodes
        ON base.traj_uid = episodes.traj_uid
        AND base.is_action_valid = episodes.is_action_valid
    WHERE estimator = 'ppo'
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
