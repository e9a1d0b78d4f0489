-- The requests of the window, its bounds, and the learner steps around it.
requests AS (
    SELECT traj_uid, group_uid, step_index, split, task_id, version_min AS version,
           epoch_us(t_start) AS begin_us, epoch_us(t_start) + gen_us AS answered_us,
           epoch_us(t_start) + gen_us + env_us AS end_us
    FROM steps
    WHERE version_min >= $oldest AND version_max <= $newest AND split <> 'imported'
      AND t_start < $reach_end::TIMESTAMP
      AND t_start + to_microseconds(gen_us + env_us) > $reach_begin::TIMESTAMP),
bounds AS (
    SELECT epoch_us($begin::TIMESTAMP) AS low_us, epoch_us($end::TIMESTAMP) AS high_us),
batches AS (
    SELECT learner_step, min(epoch_us(claimed_at)) AS claimed_us,
           max(epoch_us(trained_at)) AS trained_us, count(*) AS n_groups
    FROM lineage WHERE batch_state = 'trained' AND live
      AND claimed_at < $reach_end::TIMESTAMP + INTERVAL 1 HOUR
      AND trained_at > $reach_begin::TIMESTAMP - INTERVAL 1 HOUR
    GROUP BY learner_step)
