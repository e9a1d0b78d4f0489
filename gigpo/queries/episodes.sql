-- The score of a row is its trajectory's undiscounted return R(tau), less `invalid_penalty` where its own action was
-- invalid. So the rows of one trajectory have at most two scores, and everything about episodes (eq. 3) can be computed
-- over these two instead of over the rows: one line per trajectory and validity.
-- The penalty costs its own row and no other: it is not in the reward, so it does not reach earlier steps.
-- The unit of the statistics is the row ('steps', the authors' code: a long episode weighs more) or the trajectory
-- ('trajectories', the paper's eq. 3: its T rows weigh 1/T each).
-- in:  trajectories, returns; weighting, invalid_penalty
-- out: traj_uid, group_uid, is_action_valid BOOLEAN, score DOUBLE, n_rows BIGINT, units DOUBLE (their weight together),
--      is_counted INTEGER (1 on one line of each trajectory), mean_score DOUBLE (over all rows of the trajectory)
SELECT
    trajectories.traj_uid,
    trajectories.group_uid,
    kinds.is_action_valid,
    CASE WHEN kinds.is_action_valid THEN reward_to_go ELSE reward_to_go - invalid_penalty::DOUBLE END AS score,
    CASE WHEN kinds.is_action_valid THEN n_steps - n_invalid ELSE n_invalid END AS n_rows,
    CASE weighting
        WHEN 'steps' THEN n_rows::DOUBLE
        WHEN 'trajectories' THEN n_rows::DOUBLE / n_steps
        ELSE error(format('weighting must be steps or trajectories, not {}', weighting))
    END AS units,
    (kinds.is_action_valid OR n_invalid = n_steps)::INT AS is_counted,
    reward_to_go - invalid_penalty::DOUBLE * n_invalid / n_steps AS mean_score
FROM trajectories
LEFT JOIN (SELECT traj_uid, reward_to_go FROM returns WHERE step_index = 0) AS first_steps USING (traj_uid)
CROSS JOIN (VALUES (true), (false)) AS kinds(is_action_valid)
WHERE
    CASE WHEN kinds.is_action_valid THEN n_steps - n_invalid ELSE n_invalid END > 0
    AND CASE
        WHEN reward_to_go IS NULL
            THEN error(format(
                'trajectory {} has one step_index twice and lacks another; store each step once', traj_uid::VARCHAR))
        ELSE true
    END
