-- Score of a row: its trajectory's undiscounted return R(tau), less `invalid_penalty` where its own
-- action was invalid. The rows of one trajectory have at most two scores, so episode statistics
-- (eq. 3) are computed over one line per trajectory and validity instead of over the rows.
-- The penalty affects its own row only: it is not in the reward, so it reaches no earlier steps.
-- The unit of the statistics is the row ('steps', authors' code: a long episode has more weight) or
-- the trajectory ('trajectories', the paper's eq. 3: each of its T rows has weight 1/T).
-- in:  trajectories, returns; weighting, invalid_penalty
-- out: traj_uid, group_uid, is_action_valid BOOLEAN, score DOUBLE, units DOUBLE (total weight),
--      is_counted INTEGER (1 on one line of each trajectory),
--      mean_score DOUBLE (over all rows of the trajectory), episode_return DOUBLE (R(tau)),
--      rounding DOUBLE
SELECT
    traj_uid,
    group_uid,
    is_valid AS is_action_valid,
    CASE WHEN is_valid THEN episode_return ELSE episode_return - invalid_penalty::DOUBLE
    END AS score,
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
        UNNEST(CASE n_invalid WHEN 0 THEN [true] WHEN n_steps THEN [false] ELSE [true, false] END)
            AS is_valid
    FROM trajectories
    LEFT JOIN (SELECT traj_uid, reward_to_go FROM returns WHERE step_index = 0) AS first_steps
        ON trajectories.traj_uid = first_steps.traj_uid
)
WHERE CASE
    WHEN episode_return IS NULL
        THEN error(format(
            'trajectory {} has one step_index twice and lacks another; store each step once',
            traj_uid::VARCHAR))
    ELSE true
END
