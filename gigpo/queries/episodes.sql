-- The score of a row is its trajectory's undiscounted return R(tau), less `invalid_penalty` where its own action was
-- invalid. So the rows of one trajectory have at most two scores, and everything about episodes (eq. 3) can be computed
-- over these two instead of over the rows: one line per trajectory and validity.
-- The penalty costs its own row and no other: it is not in the reward, so it does not reach earlier steps.
-- The unit of the statistics is the row ('steps', the authors' code: a long episode weighs more) or the trajectory
-- ('trajectories', the paper's eq. 3: its T rows weigh 1/T each).
-- in:  trajectories, returns; weighting, invalid_penalty
-- out: traj_uid, group_uid, is_action_valid BOOLEAN, score DOUBLE, units DOUBLE (their weight together),
--      is_counted INTEGER (1 on one line of each trajectory), mean_score DOUBLE (over all rows of the trajectory),
--      episode_return DOUBLE (R(tau)), rounding DOUBLE
SELECT
    traj_uid,
    group_uid,
    is_valid AS is_action_valid,
    CASE WHEN is_valid THEN episode_return ELSE episode_return - invalid_penalty::DOUBLE END AS score,
    CASE WHEN is_valid THEN n_steps - n_invalid ELSE n_invalid END
        / CASE weighting WHEN 'steps' THEN 1::DOUBLE ELSE n_steps END AS units,
    (is_valid OR n_invalid = n_steps)::INT AS is_counted,
    episode_return - invalid_penalty::DOUBLE * n_invalid / n_steps AS mean_score,
    episode_return,
    rounding
FROM (
    SELECT
        trajectories.*,
        reward_to_go AS episode_return,
        UNNEST(CASE n_invalid WHEN 0 THEN [true] WHEN n_steps THEN [false] ELSE [true, false] END) AS is_valid
    FROM trajectories
    LEFT JOIN (SELECT traj_uid, reward_to_go FROM returns WHERE step_index = 0) AS first_steps
        ON trajectories.traj_uid = first_steps.traj_uid
)
WHERE CASE
    WHEN episode_return IS NULL
        THEN error(format('trajectory {} has one step_index twice and lacks another; store each step once', traj_uid::VARCHAR))
    ELSE true
END
