-- The slices, and how many requests ran at once in each bin of the window.
phases AS (
    SELECT 'engine' AS lane, split, begin_us, answered_us AS end_us FROM requests
    UNION ALL
    SELECT 'environments', split, answered_us, end_us FROM requests),
cut AS (
    SELECT lane, split, greatest(begin_us, low_us) AS begin_us, least(end_us, high_us) AS end_us,
           low_us, (high_us - low_us) / $bins AS width
    FROM phases, bounds WHERE begin_us < high_us AND end_us > low_us),
spread AS (
    SELECT *, unnest(range(floor((begin_us - low_us) / width)::BIGINT,
                           least($bins, ceil((end_us - low_us) / width))::BIGINT)) AS bin
    FROM cut)
SELECT lane, split AS what, NULL::BIGINT AS learner_step,
       (any_value(low_us) + bin * any_value(width))::BIGINT AS begin_us,
       (any_value(low_us) + (bin + 1) * any_value(width))::BIGINT AS end_us,
       sum(least(end_us, low_us + (bin + 1) * width) - greatest(begin_us, low_us + bin * width))
           / any_value(width) AS at_once, NULL AS detail
FROM spread GROUP BY lane, split, bin
UNION ALL BY NAME
SELECT s.* FROM slices AS s, bounds WHERE s.begin_us < high_us AND s.end_us >= low_us
ORDER BY lane, begin_us, what
