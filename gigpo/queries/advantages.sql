-- Advantage of every step, eq. 8:  A = A_E + omega * A_S  for gigpo and graphgpo.
-- hgpo: A = A_S of hierarchy.sql. grpo, rloo, dr_grpo, reinforce_pp and reinforce_pp_baseline have no step term: their
-- step_advantage reads 0; anchor_size is what it would have been compared with.
-- in:  hierarchy, whitening; estimator, omega
-- out: group_uid, traj_uid, step_index BIGINT, step_return DOUBLE (penalised), episode_advantage DOUBLE,
--      step_advantage DOUBLE, advantage DOUBLE, anchor_size BIGINT (steps in the anchor group, 1 = alone)
SELECT
    hierarchy.group_uid,
    hierarchy.traj_uid,
    hierarchy.step_index,
    hierarchy.step_return,
    whitening.episode_advantage,
    CASE WHEN estimator IN ('gigpo', 'graphgpo', 'hgpo') THEN hierarchy.step_advantage ELSE 0 END AS step_advantage,
    CASE
        WHEN estimator IN ('gigpo', 'graphgpo')
            THEN whitening.episode_advantage + omega::DOUBLE * hierarchy.step_advantage
        WHEN estimator = 'hgpo' THEN hierarchy.step_advantage
        ELSE whitening.episode_advantage
    END AS advantage,
    hierarchy.anchor_size
FROM hierarchy
JOIN whitening
    ON hierarchy.traj_uid = whitening.traj_uid
    AND hierarchy.is_action_valid = whitening.is_action_valid
