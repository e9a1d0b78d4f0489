-- The slices, and each request of an episode.
following AS (
    SELECT *, lead(begin_us) OVER (PARTITION BY traj_uid ORDER BY begin_us, step_index) AS next_us
    FROM requests),
traced AS (
    SELECT lane, 'all' AS thread, what, begin_us, end_us, learner_step, detail FROM slices
    UNION ALL BY NAME
    SELECT 'episodes' AS lane, traj_uid::VARCHAR AS thread, 'generates' AS what, begin_us,
           least(answered_us, coalesce(next_us, answered_us)) AS end_us,
           'step ' || step_index || ' of ' || left(task_id, 200) || ', version ' || version
               AS detail
    FROM following
    UNION ALL BY NAME
    SELECT 'episodes' AS lane, traj_uid::VARCHAR AS thread, 'environment' AS what,
           least(answered_us, coalesce(next_us, answered_us)) AS begin_us,
           least(end_us, coalesce(next_us, end_us)) AS end_us,
           'step ' || step_index || ' of ' || left(task_id, 200) AS detail
    FROM following)
SELECT make_timestamp(begin_us) AS begin_at, greatest(0, end_us - begin_us) / 1e3 AS duration_ms,
       lane, thread, what, detail, learner_step, begin_us,
       greatest(0, end_us - begin_us) AS duration_us
FROM traced, bounds WHERE begin_us < high_us AND end_us >= low_us
ORDER BY begin_us, duration_us DESC, lane, thread, what LIMIT $slices
