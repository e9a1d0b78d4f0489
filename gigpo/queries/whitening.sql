-- Whitening over the whole batch, REINFORCE++ (arXiv 2501.03262):
--   A <- (A - mean(A)) / sqrt(var(A) + 1e-8),  ddof 1, over units as in episodes.sql.
-- It is published over tokens; here it is over steps (or trajectories), because the relation has no
-- tokens. All equal, or a single unit: exactly 0. The batch is the baseline, so rows of other tasks
-- change an advantage. For reinforce_pp and reinforce_pp_baseline.
-- in:  episode_advantage; weighting
-- out: episode_advantage's columns
WITH sums AS (
    SELECT
        SUM(units) AS n_steps,
        SUM(is_counted)::DOUBLE AS n_trajectories,
        SUM(units * episode_advantage) AS total,
        MIN(episode_advantage) = MAX(episode_advantage) AS all_equal
    FROM episode_advantage
),
batch AS (
    SELECT
        CASE weighting WHEN 'steps' THEN n_steps ELSE n_trajectories END AS n,
        total / n AS mean,
        all_equal
    FROM sums
),
variance AS (
    SELECT
        mean,
        all_equal,
        n,
        SUM(units * (episode_advantage - mean) ** 2) / NULLIF(n - 1, 0) AS variance
    FROM episode_advantage
    CROSS JOIN batch
    GROUP BY mean, all_equal, n
)
SELECT
    episode_advantage.* REPLACE (
        CASE
            WHEN all_equal OR n = 1 THEN 0::DOUBLE
            ELSE (episode_advantage - mean) / SQRT(variance + 1e-8::DOUBLE)
        END AS episode_advantage
    )
FROM episode_advantage
CROSS JOIN variance
