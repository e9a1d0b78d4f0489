-- Returns that the step term compares, eq. 7: R_t, or the graph's return for graphgpo, less
-- `invalid_penalty` where the step's own action was invalid. The penalty is subtracted after
-- discounting, so it reaches no earlier steps.
-- in:  returns, graph_returns; estimator, invalid_penalty
-- out: base's columns, raw_return DOUBLE (no penalty), step_return DOUBLE (penalised),
--      n_states BIGINT (1), earlier_states VARCHAR (''): the context is the step's own state, see
--      suffixes.sql
SELECT
    * EXCLUDE (step_return, reward_to_go),
    step_return AS raw_return,
    CASE WHEN is_action_valid THEN step_return ELSE step_return - invalid_penalty::DOUBLE
    END AS step_return,
    1::BIGINT AS n_states,
    '' AS earlier_states
FROM (
    FROM returns WHERE estimator IS DISTINCT FROM 'graphgpo'
    UNION ALL BY NAME
    FROM graph_returns WHERE estimator = 'graphgpo'
)
