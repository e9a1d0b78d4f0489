-- Refuses parameters that make no sense, as AdvantageSettings does in Python. NULL is refused too: it would drop returns or
-- fall through a comparison without a word. (Where a query chooses one relation or another it compares by IS DISTINCT FROM:
-- with neither chosen nothing would be read, and nothing refused.) Otherwise this is nothing but `steps`.
-- in:  steps; every parameter
-- out: steps
FROM steps
WHERE CASE
    WHEN (estimator IN ('gigpo', 'grpo', 'rloo', 'reinforce_pp', 'reinforce_pp_baseline', 'dr_grpo', 'hgpo', 'graphgpo'))
        IS NOT TRUE
        THEN error(format('estimator must be gigpo, grpo, rloo, reinforce_pp, reinforce_pp_baseline, dr_grpo, hgpo or '
            || 'graphgpo, not {}', COALESCE(estimator::VARCHAR, 'NULL')))
    WHEN (gamma::DOUBLE BETWEEN 0 AND 1) IS NOT TRUE
        THEN error(format('gamma must be in [0, 1], not {}', COALESCE(gamma::VARCHAR, 'NULL')))
    WHEN (omega::DOUBLE >= 0 AND isfinite(omega::DOUBLE)) IS NOT TRUE
        THEN error(format('omega must be finite and at least 0, not {}', COALESCE(omega::VARCHAR, 'NULL')))
    WHEN (normalise IN ('mean', 'mean_std', 'leave_one_out')) IS NOT TRUE
        THEN error(format('normalise must be mean, mean_std or leave_one_out, not {}', COALESCE(normalise::VARCHAR, 'NULL')))
    WHEN (weighting IN ('steps', 'trajectories')) IS NOT TRUE
        THEN error(format('weighting must be steps or trajectories, not {}', COALESCE(weighting::VARCHAR, 'NULL')))
    WHEN (invalid_penalty::DOUBLE >= 0 AND isfinite(invalid_penalty::DOUBLE)) IS NOT TRUE
        THEN error(format('invalid_penalty must be finite and at least 0, not {}',
            COALESCE(invalid_penalty::VARCHAR, 'NULL')))
    WHEN (anchor IN ('state', 'state_and_actions', 'suffix', 'similar', 'similar_greedy', 'anchor_key')) IS NOT TRUE
        THEN error(format('anchor must be state, state_and_actions, suffix, similar, similar_greedy or anchor_key, not {}',
            COALESCE(anchor::VARCHAR, 'NULL')))
    WHEN (anchor_history::BIGINT >= 1) IS NOT TRUE
        THEN error(format('anchor_history must be at least 1, not {}', COALESCE(anchor_history::VARCHAR, 'NULL')))
    WHEN (versions IN ('mixed', 'window', 'weighted')) IS NOT TRUE
        THEN error(format('versions must be mixed, window or weighted, not {}', COALESCE(versions::VARCHAR, 'NULL')))
    WHEN (version_window::BIGINT >= 0) IS NOT TRUE
        THEN error(format('version_window must be at least 0, not {}', COALESCE(version_window::VARCHAR, 'NULL')))
    WHEN estimator = 'hgpo' AND anchor <> 'state'
        THEN error(format('anchor must be state with estimator hgpo, whose anchors are suffixes of states, not {}', anchor))
    ELSE true
END
