-- Episode advantage, eq. 3:  A_E = (x - mean(x)) / F,  x = episode_score, over the group of one task.
-- F = 1 ('mean') or the standard deviation with ddof 1, plus 1e-6 ('mean_std').
-- With weighting 'steps' (the authors' code, default) n = rows, so a long episode weighs more; with 'trajectories'
-- (the paper) n = trajectories. Both are  mean = sum(w x) / n,  var = sum(w (x - mean)^2) / (n - 1),  sum(w) = n.
-- Nothing to compare (n = 1): mean 0, deviation 1, so A_E is the score itself. All scores equal: exactly 0.
-- in:  scores; normalise, weighting
-- out: scores' columns, episode_advantage DOUBLE
WITH means AS (
    SELECT
        group_uid,
        COUNT(*) FILTER (weighting = 'steps' OR step_index = 0) AS n,
        SUM(weight * episode_score) / n AS mean,
        MIN(episode_score) = MAX(episode_score) AS all_equal
    FROM scores
    GROUP BY group_uid
),
deviations AS (
    SELECT group_uid, n, mean, all_equal, SQRT(SUM(weight * (episode_score - mean) ** 2) / NULLIF(n - 1, 0)) AS deviation
    FROM scores
    JOIN means USING (group_uid)
    GROUP BY group_uid, n, mean, all_equal
)
SELECT
    scores.*,
    CASE
        WHEN n = 1 THEN episode_score
        WHEN all_equal THEN 0
        ELSE episode_score - mean
    END / CASE
        WHEN normalise = 'mean' THEN 1
        WHEN normalise = 'mean_std' THEN (CASE WHEN n = 1 THEN 1 ELSE deviation END) + 1e-6::DOUBLE
        ELSE error(format('normalise must be mean or mean_std, not {}', normalise))
    END AS episode_advantage
FROM scores
JOIN deviations USING (group_uid)
