-- Discounted return of every step, eq. 5:  R_t = r_t + gamma * R_{t+1},  0 past the last step.
-- There is no bootstrap, also not after a truncation: steps that were not played earned nothing.
-- The recursion starts at each trajectory's last step and goes back (Horner), so it equals the
-- float64 loop bit for bit, for every gamma in [0, 1] and every length. SUM(r * gamma^t) / gamma^t
-- would divide 0 by 0 for small gamma. The undiscounted return takes the same recursion:
-- SUM(reward) would add in any order, and equal episodes could differ.
-- in:  base, trajectories; gamma
-- out: base's columns, step_return DOUBLE (R_t), reward_to_go DOUBLE (R_t for gamma = 1)
SELECT base.*, base.reward AS step_return, base.reward AS reward_to_go
FROM base
JOIN trajectories
    ON base.traj_uid = trajectories.traj_uid AND base.step_index = trajectories.n_steps - 1
UNION ALL
SELECT
    base.*,
    base.reward + gamma::DOUBLE * later.step_return AS step_return,
    base.reward + later.reward_to_go AS reward_to_go
FROM returns AS later
JOIN base ON base.traj_uid = later.traj_uid AND base.step_index = later.step_index - 1
