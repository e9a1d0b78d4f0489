-- Refuse parameters that make no sense, as AdvantageSettings does in Python. Otherwise this is
-- `steps`. NULL is refused, because it would drop returns or fall through a comparison silently.
-- (Where a query chooses between relations it uses IS DISTINCT FROM: with neither chosen nothing
-- would be read, and nothing refused.) Values that cast to a number are accepted, as in all SQL:
-- '0.5', true, and 2.0 for a whole number; 2.5 and '2.5' are no whole numbers.
-- tests/configs/test_algorithm.py keeps names, defaults, choices and bounds equal to those of
-- AdvantageSettings.
-- in:  steps; every parameter
-- out: steps
FROM steps
WHERE CASE
    WHEN (estimator IN ('gigpo', 'grpo', 'rloo', 'reinforce_pp', 'reinforce_pp_baseline', 'dr_grpo',
        'hgpo', 'graphgpo', 'g2po', 'gagpo', 'turn_ppo', 'ppo')) IS NOT TRUE
        THEN error(format('estimator must be gigpo, grpo, rloo, reinforce_pp, '
            || 'reinforce_pp_baseline, dr_grpo, hgpo, graphgpo, g2po, gagpo, turn_ppo or ppo, '
            || 'not {}',
            COALESCE(estimator::VARCHAR, 'NULL')))
    WHEN (TRY_CAST(gamma AS DOUBLE) BETWEEN 0 AND 1) IS NOT TRUE
        THEN error(format('gamma must be in [0, 1], not {}', COALESCE(gamma::VARCHAR, 'NULL')))
    WHEN (TRY_CAST(gae_lambda AS DOUBLE) BETWEEN 0 AND 1) IS NOT TRUE
        THEN error(format('gae_lambda must be in [0, 1], not {}',
            COALESCE(gae_lambda::VARCHAR, 'NULL')))
    WHEN (TRY_CAST(graph_gamma AS DOUBLE) BETWEEN 0 AND 1) IS NOT TRUE
        THEN error(format('graph_gamma must be in [0, 1], not {}',
            COALESCE(graph_gamma::VARCHAR, 'NULL')))
    WHEN (TRY_CAST(omega AS DOUBLE) >= 0 AND isfinite(TRY_CAST(omega AS DOUBLE))) IS NOT TRUE
        THEN error(format('omega must be finite and at least 0, not {}',
            COALESCE(omega::VARCHAR, 'NULL')))
    WHEN (normalise IN ('mean', 'mean_std', 'leave_one_out')) IS NOT TRUE
        THEN error(format('normalise must be mean, mean_std or leave_one_out, not {}',
            COALESCE(normalise::VARCHAR, 'NULL')))
    WHEN (weighting IN ('steps', 'trajectories')) IS NOT TRUE
        THEN error(format('weighting must be steps or trajectories, not {}',
            COALESCE(weighting::VARCHAR, 'NULL')))
    WHEN (TRY_CAST(invalid_penalty AS DOUBLE) >= 0
        AND isfinite(TRY_CAST(invalid_penalty AS DOUBLE))) IS NOT TRUE
        THEN error(format('invalid_penalty must be finite and at least 0, not {}',
            COALESCE(invalid_penalty::VARCHAR, 'NULL')))
    WHEN (anchor IN ('state', 'state_and_actions', 'suffix', 'similar', 'similar_greedy',
        'anchor_key')) IS NOT TRUE
        THEN error(format('anchor must be state, state_and_actions, suffix, similar, '
            || 'similar_greedy or anchor_key, not {}',
            COALESCE(anchor::VARCHAR, 'NULL')))
    WHEN (TRY_CAST(anchor_history AS BIGINT) BETWEEN 1 AND 4611686018427387903
        AND TRY_CAST(anchor_history AS DOUBLE) = TRY_CAST(anchor_history AS BIGINT)) IS NOT TRUE
        THEN error(format('anchor_history must be a whole number of at least 1 and less than '
            || '2^62, not {}',
            COALESCE(anchor_history::VARCHAR, 'NULL')))
    WHEN (anchor_versions IN ('mixed', 'window', 'weighted')) IS NOT TRUE
        THEN error(format('anchor_versions must be mixed, window or weighted, not {}',
            COALESCE(anchor_versions::VARCHAR, 'NULL')))
    WHEN (TRY_CAST(version_window AS BIGINT) BETWEEN 0 AND 4611686018427387903
        AND TRY_CAST(version_window AS DOUBLE) = TRY_CAST(version_window AS BIGINT)) IS NOT TRUE
        THEN error(format('version_window must be a whole number of at least 0 and less than '
            || '2^62, not {}',
            COALESCE(version_window::VARCHAR, 'NULL')))
    WHEN estimator = 'hgpo' AND anchor <> 'state'
        THEN error(format('anchor must be state with estimator hgpo, whose anchors are suffixes of '
            || 'states, not {}', anchor))
    WHEN estimator IN ('g2po', 'gagpo') AND anchor_versions = 'weighted'
        THEN error(format('anchor_versions must be mixed or window with estimator {}: the values '
            || 'of its nodes have no weights', estimator))
    WHEN anchor IN ('similar', 'similar_greedy')
        THEN error(format('anchor {} compares texts, which SQL alone cannot: '
            || 'ask `gigpo audit RUN`, '
            || 'or make a column anchor_key with gigpo.similarity_keys and ask '
            || 'advantages(anchor := ''anchor_key''), or for no texts '
            || 'advantages(anchor := ''state'')', anchor))
    ELSE true
END
