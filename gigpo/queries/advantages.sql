-- Advantage of every step, eq. 8:  A = A_E + omega * A_S
-- episode_terms.sql and step_terms.sql choose both terms, and the weight of the second, by the
-- estimator.
-- The last three columns say whether there is anything to learn, see gigpo/group_filter.py. They
-- ignore differences that rounding can make (trajectories.sql): .1 + .2 + .3 and .3 + .2 + .1 are
-- the same return, whatever their last bits are.
-- in:  episode_terms, step_terms
-- out: group_uid, traj_uid, step_index BIGINT, step_return DOUBLE (penalised),
--      episode_advantage DOUBLE, step_advantage DOUBLE, advantage DOUBLE,
--      anchor_size BIGINT (steps in the anchor group, 1 = alone; without a step term those that
--      the step would have been compared with),
--      episode_return DOUBLE (of the trajectory: undiscounted, no penalty),
--      episodes_differ BOOLEAN (episode returns of its group differ),
--      steps_differ BOOLEAN (step returns of its anchor group differ before penalties; false
--      without a step term, and with a critic),
--      has_penalties BOOLEAN (a row of its group has a penalty),
--      value_target DOUBLE (the critic's target, for turn_ppo and ppo; otherwise NULL)
SELECT
    step_terms.group_uid,
    step_terms.traj_uid,
    step_terms.step_index,
    step_terms.step_return,
    episode_terms.episode_advantage,
    step_terms.step_advantage,
    episode_terms.episode_advantage + step_weight * step_terms.step_advantage AS advantage,
    step_terms.anchor_size,
    episode_terms.episode_return,
    episode_terms.episodes_differ,
    step_weight > 0 AND step_terms.spread > episode_terms.rounding AS steps_differ,
    episode_terms.has_penalties,
    step_terms.value_target
FROM step_terms
JOIN episode_terms
    ON step_terms.traj_uid = episode_terms.traj_uid
    AND step_terms.is_action_valid = episode_terms.is_action_valid
