-- Episode advantage, eq. 3:  A_E = (x - baseline) / F,  with the score x of an episode.
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
WITH compared AS (
    SELECT
        episodes.* EXCLUDE (rounding),
        episode_groups.* EXCLUDE (group_uid),
        CASE
            WHEN estimator IN ('hgpo', 'gagpo', 'turn_ppo', 'ppo') THEN 'nothing'
            WHEN estimator = 'reinforce_pp' OR n = 1 THEN 'itself'
            WHEN estimator = 'rloo' THEN 'leave_one_out'
            WHEN estimator IN ('dr_grpo', 'reinforce_pp_baseline') THEN 'mean'
            WHEN normalise = 'leave_one_out' THEN 'leave_one_out'
            ELSE 'mean'
        END AS comparison,
        normalise = 'mean_std' AND estimator IN ('gigpo', 'grpo', 'graphgpo', 'g2po') AS is_scaled,
        CASE weighting WHEN 'steps' THEN score ELSE mean_score END AS own_score
    FROM episodes
    JOIN episode_groups ON episodes.group_uid = episode_groups.group_uid
),
terms AS (
    SELECT
        *,
        CASE comparison
            WHEN 'mean' THEN mean
            WHEN 'leave_one_out' THEN (n * mean - own_score) / (n - 1)
            ELSE 0
        END AS baseline,
        CASE
            WHEN NOT is_scaled THEN 1
            WHEN n = 1 THEN 1 + 1e-6::DOUBLE
            ELSE deviation + 1e-6::DOUBLE
        END AS F
    FROM compared
)
SELECT
    * EXCLUDE (
        comparison, is_scaled, own_score, n, mean, deviation, all_equal, baseline, F
    ),
    CASE
        WHEN comparison = 'nothing' THEN 0
        WHEN comparison <> 'itself' AND all_equal THEN 0
        ELSE (score - baseline) / F
    END AS episode_advantage
FROM terms
