-- Advantage of every step, eq. 8:  A = A_E + omega * A_S.
-- in:  step_advantage; omega
-- out: group_uid UUID, traj_uid UUID, step_index BIGINT, step_return DOUBLE (penalised), episode_advantage DOUBLE,
--      step_advantage DOUBLE, advantage DOUBLE, anchor_size BIGINT (steps in the anchor group, 1 = alone)
SELECT
    group_uid,
    traj_uid,
    step_index,
    step_return,
    episode_advantage,
    step_advantage,
    episode_advantage + omega::DOUBLE * step_advantage AS advantage,
    anchor_size
FROM step_advantage
