-- PPO with a critic (arXiv 1707.06347), in the form of verl. An estimate of each step, whitened
-- over the steps of the batch:
--   A <- (A - mean(A)) / sqrt(var(A) + 1e-8),  ddof 1.
--   turn_ppo  the estimate of gae.sql (arXiv 2512.17008), less the penalty of an invalid action,
--             which is in no value and in no target of one, as it is in no return
--   ppo       the row's score (episodes.sql, penalty included), which is the target, less the value
--             of its first token: that token's estimate with lambda 1. token_advantages.py has
--             those of all tokens
-- All equal, or a single step: exactly 0. The sums read no anchor group, so their last bits do not
-- depend on `anchor`. The estimate of ppo is computed twice, because a join of all steps by their
-- keys takes longer. For turn_ppo and ppo only.
-- in:  step_advantage (for its other columns), gae, critic_values, episodes; estimator,
--      invalid_penalty
-- out: step_advantage's columns, with the whitened estimate for step_advantage; value_target DOUBLE
WITH turns AS MATERIALIZED (
    SELECT
        traj_uid,
        step_index,
        gae - CASE WHEN is_action_valid THEN 0 ELSE invalid_penalty::DOUBLE END AS estimate,
        value_target
    FROM gae
    WHERE estimator = 'turn_ppo'
),
batch AS (
    SELECT
        AVG(estimate) AS mean,
        VAR_SAMP(estimate) AS variance,
        MIN(estimate) = MAX(estimate) AS is_constant
    FROM (
        SELECT estimate FROM turns
        UNION ALL
        SELECT score - state_value AS estimate
        FROM critic_values
        JOIN episodes
            ON critic_values.traj_uid = episodes.traj_uid
            AND critic_values.is_action_valid = episodes.is_action_valid
        WHERE estimator = 'ppo'
    )
)
SELECT
    estimates.* EXCLUDE (estimate) REPLACE (
        CASE WHEN is_constant THEN 0 ELSE (estimate - mean) / SQRT(variance + 1e-8::DOUBLE)
        END AS step_advantage
    )
FROM (
    SELECT step_advantage.*, estimate, value_target
    FROM step_advantage
    JOIN turns
        ON step_advantage.traj_uid = turns.traj_uid
        AND step_advantage.step_index = turns.step_index
    WHERE estimator = 'turn_ppo'
    UNION ALL BY NAME
    SELECT step_advantage.*, score - step_advantage.value AS estimate, score AS value_target
    FROM step_advantage
    JOIN episodes
        ON step_advantage.traj_uid = episodes.traj_uid
        AND step_advantage.is_action_valid = episodes.is_action_valid
    WHERE estimator = 'ppo'
) AS estimates
CROSS JOIN batch
