-- Step term of eq. 8, A_S and its weight: each estimator takes A_S from one relation.
--   gigpo, graphgpo, gagpo  step_advantage       g2po           g2po_terms
--   hgpo                    hierarchy            turn_ppo, ppo  ppo_terms
--   otherwise               no A_S: 0, with the anchor_size that the step would have had
-- The weight is omega, or 1 for an estimator that has no A_E. A critic's estimate is compared with
-- no other step, so its spread is 0.
-- The last part also reads the steps for an estimator that is NULL, which checked.sql then refuses.
-- in:  step_advantage, hierarchy, g2po_terms, ppo_terms; estimator, omega
-- out: group_uid, traj_uid, step_index BIGINT, is_action_valid BOOLEAN, step_return DOUBLE,
--      step_advantage DOUBLE, step_weight DOUBLE, anchor_size BIGINT,
--      spread DOUBLE (of compared returns without penalty; 0 = alone, or not compared),
--      value_target DOUBLE (the critic's; NULL without one), and columns that nothing reads
WITH compared AS (
    SELECT * REPLACE (COALESCE(node_size, anchor_size) AS anchor_size), NULL::DOUBLE AS value_target
    FROM step_advantage
)
SELECT
    *,
    CASE WHEN estimator IN ('gigpo', 'graphgpo', 'g2po') THEN omega::DOUBLE ELSE 1 END
        AS step_weight
FROM (
    FROM compared WHERE estimator IN ('gigpo', 'graphgpo', 'gagpo')
    UNION ALL BY NAME
    FROM hierarchy WHERE estimator = 'hgpo'
    UNION ALL BY NAME
    FROM g2po_terms WHERE estimator = 'g2po'
    UNION ALL BY NAME
    SELECT * REPLACE (0::DOUBLE AS spread) FROM ppo_terms WHERE estimator IN ('turn_ppo', 'ppo')
    UNION ALL BY NAME
    SELECT * REPLACE (0::DOUBLE AS step_advantage, 0::DOUBLE AS spread)
    FROM compared
    WHERE (estimator IN ('gigpo', 'graphgpo', 'gagpo', 'hgpo', 'g2po', 'turn_ppo', 'ppo'))
        IS NOT TRUE
)
