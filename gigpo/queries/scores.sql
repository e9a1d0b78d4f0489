-- The steps, with the returns that the step term compares, eq. 7: R_t, less `invalid_penalty` where
-- the step's own action was invalid. The penalty is subtracted after discounting, so it reaches no
-- earlier steps.
-- graphgpo compares other returns, see graph_returns.sql. It has one row more for each trajectory
-- that was not won: the state of the observation after the last action, at step_index T.
-- in:  returns, base, trajectories; estimator, invalid_penalty
-- out: base's columns but those of the final observation, raw_return DOUBLE (no penalty; NULL for
--      graphgpo), step_return DOUBLE (penalised; NULL for graphgpo), is_final BOOLEAN,
--      n_states BIGINT (1), earlier_states VARCHAR (''): the context is the step's own state, see
--      suffixes.sql
SELECT
    * EXCLUDE (final_state_hash, final_anchor_key, final_admissible_actions),
    CASE WHEN is_action_valid THEN raw_return ELSE raw_return - invalid_penalty::DOUBLE
    END AS step_return,
    1::BIGINT AS n_states,
    '' AS earlier_states
FROM (
    SELECT * EXCLUDE (step_return, reward_to_go), step_return AS raw_return, false AS is_final
    FROM returns
    WHERE estimator IS DISTINCT FROM 'graphgpo'
    UNION ALL BY NAME
    SELECT *, NULL::DOUBLE AS raw_return, false AS is_final
    FROM base
    WHERE estimator = 'graphgpo'
    UNION ALL BY NAME
    SELECT
        base.* REPLACE (
            base.step_index + 1 AS step_index,
            base.final_state_hash AS state_hash,
            base.final_anchor_key AS anchor_key,
            base.final_admissible_actions AS admissible_actions
        ),
        NULL::DOUBLE AS raw_return,
        true AS is_final
    FROM base
    JOIN trajectories
        ON base.traj_uid = trajectories.traj_uid AND base.step_index = trajectories.n_steps - 1
    WHERE estimator = 'graphgpo' AND CASE
        WHEN trajectories.won IS NULL
            THEN error(format('graphgpo needs to know whether trajectory {} was won; '
                || 'give `steps` a column won',
                base.traj_uid::VARCHAR))
        ELSE NOT trajectories.won
    END
)
