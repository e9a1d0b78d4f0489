-- What the step term compares (eq. 7): R_t, or the graph's return for graphgpo, less `invalid_penalty` where the step's
-- own action was invalid. The penalty comes after discounting: it does not reach earlier steps.
-- in:  returns, graph_returns; estimator, invalid_penalty
-- out: base's columns, step_return DOUBLE (penalised)
SELECT
    * EXCLUDE (step_return, reward_to_go),
    CASE WHEN is_action_valid THEN step_return ELSE step_return - invalid_penalty::DOUBLE END AS step_return
FROM (
    FROM returns WHERE estimator <> 'graphgpo'
    UNION ALL
    SELECT returns.* REPLACE (graph_return AS step_return)
    FROM returns
    JOIN graph_returns USING (traj_uid, step_index)
    WHERE estimator = 'graphgpo'
)
