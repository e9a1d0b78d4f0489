-- Episode advantage, eq. 3:  A_E = (x - baseline) / F,  x = score.
--   gigpo, grpo, graphgpo, g2po  by `normalise`:
--       mean            x - mean                         (the paper's F = 1)
--       mean_std        (x - mean) / (deviation + 1e-6)  (GRPO, arXiv 2402.03300, authors' epsilon)
--       leave_one_out   x - mean of the others           (Kool et al. 2019)
--                       With weighting 'trajectories' the baseline does not contain x, so it is
--                       unbiased. With 'steps' the others are the other rows,
--                       (x - mean) * n / (n - 1), some of the same trajectory (authors' code).
--   rloo                   always leave_one_out (arXiv 2402.14740)
--   dr_grpo                always mean (arXiv 2503.20783). The other half of Dr.GRPO, no division
--                          by the response's length, is a loss aggregation.
--   reinforce_pp           x, whitened over the batch by whitening.sql, without a baseline of the
--                          group (arXiv 2501.03262)
--   reinforce_pp_baseline  x - mean, then whitened over the batch
--   hgpo, gagpo, turn_ppo, ppo  0: they have a step term only
-- Nothing to compare (n = 1): the score, as in the authors' code (divided by 1 + 1e-6 with
-- mean_std). All scores equal: exactly 0.
-- in:  episodes, episode_groups; estimator, normalise, weighting
-- out: episodes' columns but rounding, episode_groups' rounding, episodes_differ, has_penalties,
--      episode_advantage DOUBLE
SELECT
    episodes.* EXCLUDE (rounding),
    episode_groups.rounding,
    episode_groups.episodes_differ,
    episode_groups.has_penalties,
    CASE
        WHEN estimator IN ('hgpo', 'gagpo', 'turn_ppo', 'ppo') THEN 0
        WHEN estimator = 'reinforce_pp' THEN score
        WHEN n = 1 THEN score
        WHEN all_equal THEN 0
        WHEN estimator = 'rloo'
            OR (normalise = 'leave_one_out' AND estimator IN ('gigpo', 'grpo', 'graphgpo', 'g2po'))
            THEN score
                - (n * mean - CASE weighting WHEN 'steps' THEN score ELSE mean_score END) / (n - 1)
        ELSE score - mean
    END / CASE
        WHEN normalise = 'mean_std' AND estimator IN ('gigpo', 'grpo', 'graphgpo', 'g2po')
            THEN CASE WHEN n = 1 THEN 1 ELSE deviation END + 1e-6::DOUBLE
        ELSE 1
    END AS episode_advantage
FROM episodes
JOIN episode_groups ON episodes.group_uid = episode_groups.group_uid
