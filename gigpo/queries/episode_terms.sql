-- Episode term A_E of eq. 8: of episode_advantage.sql, for REINFORCE++ whitened over the batch.
-- Estimators with a step term only have 0. IS NOT TRUE also reads the steps for an estimator that
-- is NULL, which checked.sql then refuses.
-- in:  episode_advantage, whitening; estimator
-- out: episode_advantage's columns
FROM episode_advantage
WHERE (estimator IN ('reinforce_pp', 'reinforce_pp_baseline')) IS NOT TRUE
UNION ALL BY NAME
FROM whitening WHERE estimator IN ('reinforce_pp', 'reinforce_pp_baseline')
