-- The view generation_overlap for this window's requests and learner steps, and for the window
-- itself (a span without a learner step): each interval adds what the ones before have not covered.
phases AS (
    SELECT 'engine' AS lane, begin_us, answered_us AS end_us FROM requests
    UNION ALL
    SELECT 'environments', answered_us, end_us FROM requests),
spans AS (
    SELECT learner_step, n_groups, claimed_us AS from_us, trained_us AS until_us
    FROM batches, bounds WHERE claimed_us < high_us AND trained_us > low_us
    UNION ALL
    SELECT NULL, NULL, low_us, high_us FROM bounds),
beside AS (
    SELECT s.*, p.*, max(p.end_us) OVER (
               PARTITION BY learner_step, lane ORDER BY p.begin_us
               ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS covered_us
    FROM spans AS s LEFT JOIN phases AS p ON p.begin_us < s.until_us AND p.end_us > s.from_us),
added AS (
    SELECT *, greatest(0, least(end_us, until_us) - greatest(begin_us, from_us, covered_us))
        AS added_us FROM beside),
shares AS (
    SELECT learner_step, n_groups, from_us, (until_us - from_us) / 1e6 AS span_s,
           coalesce(sum(added_us) FILTER (lane = 'engine'), 0) / (until_us - from_us) AS engine,
           coalesce(sum(added_us) FILTER (lane = 'environments'), 0) / (until_us - from_us)
               AS environments
    FROM added GROUP BY learner_step, n_groups, from_us, until_us)
SELECT s.learner_step, make_timestamp(s.from_us) AS claimed_at, s.span_s AS training_s,
       s.engine AS overlap, s.n_groups AS groups,
       sum(s.engine * s.span_s) OVER () / sum(s.span_s) OVER () AS overlap_of_all,
       w.engine, w.environments
FROM shares AS w LEFT JOIN shares AS s ON s.learner_step IS NOT NULL
WHERE w.learner_step IS NULL ORDER BY s.learner_step DESC
