-- Advantage of every step, eq. 8:  A = A_E + omega * A_S  for gigpo, graphgpo and g2po.
-- hgpo: A = A_S of hierarchy.sql; gagpo, turn_ppo and ppo: A = A_S, the normalised estimate of
-- gae.sql or ppo_terms.sql.
-- The other estimators have no step term: their step_advantage is 0, and anchor_size is the size of
-- the group that the step would have been compared with.
-- The last three columns say whether there is anything to learn, see gigpo/group_filter.py. They
-- ignore differences that rounding can make (trajectories.sql): .1 + .2 + .3 and .3 + .2 + .1 are
-- the same return, whatever their last bits are.
-- in:  step_advantage, hierarchy, g2po_terms, ppo_terms, episode_advantage, whitening;
--      estimator, omega
-- out: group_uid, traj_uid, step_index BIGINT, step_return DOUBLE (penalised),
--      episode_advantage DOUBLE, step_advantage DOUBLE, advantage DOUBLE,
--      anchor_size BIGINT (steps in the anchor group, 1 = alone),
--      episode_return DOUBLE (of the trajectory: undiscounted, no penalty),
--      episodes_differ BOOLEAN (episode returns of its group differ),
--      steps_differ BOOLEAN (step returns of its anchor group differ before penalties; false
--      without a step term),
--      has_penalties BOOLEAN (a row of its group has a penalty),
--      value_target DOUBLE (the critic's target, for turn_ppo and ppo; otherwise NULL)
SELECT
    step_terms.group_uid,
    step_terms.traj_uid,
    step_terms.step_index,
    step_terms.step_return,
    episode_terms.episode_advantage,
    CASE WHEN estimator IN ('gigpo', 'graphgpo', 'hgpo', 'g2po', 'gagpo', 'turn_ppo', 'ppo')
        THEN step_terms.step_advantage
        ELSE 0
    END AS step_advantage,
    CASE
        WHEN estimator IN ('gigpo', 'graphgpo', 'g2po')
            THEN episode_terms.episode_advantage + omega::DOUBLE * step_terms.step_advantage
        WHEN estimator IN ('hgpo', 'gagpo', 'turn_ppo', 'ppo') THEN step_terms.step_advantage
        ELSE episode_terms.episode_advantage
    END AS advantage,
    step_terms.anchor_size,
    episode_terms.episode_return,
    episode_terms.episodes_differ,
    (
        estimator IN ('hgpo', 'gagpo')
        OR (estimator IN ('gigpo', 'graphgpo', 'g2po') AND omega::DOUBLE > 0)
    )
        AND step_terms.spread > episode_terms.rounding AS steps_differ,
    episode_terms.has_penalties,
    step_terms.value_target
FROM (
    SELECT
        * REPLACE (COALESCE(node_size, anchor_size) AS anchor_size), NULL::DOUBLE AS value_target
    FROM step_advantage
    WHERE (estimator IN ('hgpo', 'g2po', 'turn_ppo', 'ppo')) IS NOT TRUE
    UNION ALL BY NAME
    FROM hierarchy WHERE estimator = 'hgpo'
    UNION ALL BY NAME
    FROM g2po_terms WHERE estimator = 'g2po'
    UNION ALL BY NAME
    FROM ppo_terms WHERE estimator IN ('turn_ppo', 'ppo')
) AS step_terms
JOIN (
    FROM episode_advantage
    WHERE (estimator IN ('reinforce_pp', 'reinforce_pp_baseline')) IS NOT TRUE
    UNION ALL BY NAME
    FROM whitening WHERE estimator IN ('reinforce_pp', 'reinforce_pp_baseline')
) AS episode_terms
    ON step_terms.traj_uid = episode_terms.traj_uid
    AND step_terms.is_action_valid = episode_terms.is_action_valid
