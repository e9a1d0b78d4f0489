-- What is compared: R_t for the step term (eq. 7), the trajectory's return R(tau) for the episode term (eq. 3).
-- An invalid action costs its own row `invalid_penalty`, once in R_t and once in the row's copy of R(tau), and costs no
-- other row anything: the penalty comes after discounting, so it does not reach earlier steps.
-- `weight` is the row's weight in eq. 3's mean: 1 each, or 1/T so that every trajectory weighs 1 in all.
-- in:  returns; weighting, invalid_penalty
-- out: group_uid, traj_uid, step_index, state_hash, step_return DOUBLE, episode_score DOUBLE, weight DOUBLE
SELECT
    returns.group_uid,
    returns.traj_uid,
    returns.step_index,
    returns.state_hash,
    CASE WHEN is_action_valid THEN step_return ELSE step_return - invalid_penalty::DOUBLE END AS step_return,
    CASE WHEN is_action_valid THEN episode_return ELSE episode_return - invalid_penalty::DOUBLE END AS episode_score,
    CASE weighting
        WHEN 'steps' THEN 1::DOUBLE
        WHEN 'trajectories' THEN 1::DOUBLE / n_steps
        ELSE error(format('weighting must be steps or trajectories, not {}', weighting))
    END AS weight
FROM returns
JOIN (SELECT traj_uid, reward_to_go AS episode_return FROM returns WHERE step_index = 0) AS episodes
    ON returns.traj_uid = episodes.traj_uid
