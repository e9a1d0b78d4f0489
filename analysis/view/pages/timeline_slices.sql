-- The slices of every lane except the requests.
in_order AS (
    SELECT *, lag(trained_us) OVER (ORDER BY learner_step) AS before_us FROM batches),
times AS (
    SELECT learner_step, name, value * 1e6 AS value_us FROM metrics
    WHERE name IN ('time/publish_s', 'time/checkpoint_s')
      AND learner_step BETWEEN (SELECT min(learner_step) FROM batches)
                           AND (SELECT max(learner_step) + 1 FROM batches)),
slices AS (
    SELECT 'learner' AS lane, 'trains' AS what, learner_step,
           greatest(claimed_us, coalesce(before_us, claimed_us)) AS begin_us,
           trained_us AS end_us, n_groups || ' groups' AS detail FROM in_order
    UNION ALL BY NAME
    SELECT 'learner' AS lane, 'waits' AS what, learner_step, before_us AS begin_us,
           claimed_us AS end_us, 'for groups' AS detail
    FROM in_order WHERE claimed_us > before_us
    UNION ALL BY NAME
    SELECT 'publishing' AS lane, 'publishes' AS what, v.learner_step,
           epoch_us(published_at) - coalesce(t.value_us, 0)::BIGINT AS begin_us,
           epoch_us(published_at) AS end_us, 'version ' || version AS detail
    FROM versions AS v LEFT JOIN times AS t
      ON t.learner_step = v.learner_step AND t.name = 'time/publish_s'
    UNION ALL BY NAME
    SELECT 'checkpoints' AS lane, 'saves' AS what, c.learner_step,
           least(coalesce(b.trained_us, epoch_us(saved_at)), epoch_us(saved_at)) AS begin_us,
           greatest(epoch_us(saved_at), begin_us + coalesce(t.value_us, 0)::BIGINT) AS end_us,
           path AS detail
    FROM checkpoints AS c LEFT JOIN batches AS b USING (learner_step)
    LEFT JOIN times AS t
      ON t.learner_step = c.learner_step + 1 AND t.name = 'time/checkpoint_s'
    WHERE c.live
    UNION ALL BY NAME
    SELECT worker AS lane, 'pauses' AS what,
           (epoch_us(loaded_at) - pause_ms * 1e3)::BIGINT AS begin_us,
           epoch_us(loaded_at) AS end_us, 'loads version ' || version AS detail
    FROM weight_loads
    WHERE loaded_at BETWEEN $begin::TIMESTAMP AND $end::TIMESTAMP + INTERVAL 1 MINUTE
    UNION ALL BY NAME
    SELECT 'evaluation' AS lane, 'evaluates' AS what, min(epoch_us(opened_at)) AS begin_us,
           max(epoch_us(coalesce(completed_at, $end::TIMESTAMP))) AS end_us,
           'version ' || evaluated_version AS detail
    FROM groups WHERE split = 'heldout' GROUP BY evaluated_version
    UNION ALL BY NAME
    SELECT 'events' AS lane, what, epoch_us(logged_at) AS begin_us,
           epoch_us(logged_at) AS end_us, component || ': ' || left(detail, 200) AS detail
    FROM events WHERE what <> 'weights loaded')
