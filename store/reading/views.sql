-- To add a view: write it here, describe it in docs/sql.md ("The views"), and list it in VIEWS of
-- tests/store/test_reader.py and, if a rebuild gives it back, of tests/store/test_rebuild.py.

-- One row per step of every committed trajectory, with the file that holds it. A segment may hold
-- trajectories that another segment committed first: those rows are excluded.
CREATE OR REPLACE VIEW stored_steps AS
SELECT s.* EXCLUDE (filename)
       REPLACE (s.traj_uid::UUID AS traj_uid, s.group_uid::UUID AS group_uid,
                s.state_hash::UUID AS state_hash,
                s.final_state_hash::UUID AS final_state_hash,
                -- UTC without a zone, as in the exported tables
                make_timestamp(epoch_us(s.t_start)) AS t_start),
       replace(filename, getvariable('run') || '/', '') AS file
FROM read_parquet(
    getvariable('segments'), schema = getvariable('columns'), filename = TRUE) AS s
ANTI JOIN (
    SELECT getvariable('run') || '/' || path AS filename, traj_uid FROM exported.excluded) AS e
    ON s.filename = e.filename AND s.traj_uid = e.traj_uid;

CREATE OR REPLACE VIEW steps AS SELECT * EXCLUDE (file) FROM stored_steps;

CREATE OR REPLACE VIEW trajectories AS
SELECT traj_uid, any_value(group_uid) AS group_uid, any_value(env_name) AS env_name,
       any_value(task_id) AS task_id, any_value(split) AS split, any_value(seed) AS seed,
       any_value(member) AS member, any_value(won) AS won, any_value(task_score) AS task_score,
       count(*) AS n_steps, sum(reward) AS episode_return,
       count(*) FILTER (NOT is_action_valid) AS invalid_steps, bool_or(truncated) AS truncated,
       min(version_min) AS version_min, max(version_max) AS version_max,
       min(t_start) AS started_at, sum(gen_us) AS gen_us, sum(env_us) AS env_us,
       sum(len(response_ids)) AS n_response_tokens,
       any_value(final_observation) AS final_observation
FROM steps GROUP BY traj_uid;

CREATE OR REPLACE VIEW groups AS
SELECT * EXCLUDE (changed_lsn) REPLACE (group_uid::UUID AS group_uid) FROM exported.groups
QUALIFY row_number() OVER (PARTITION BY group_uid ORDER BY changed_lsn DESC) = 1;

-- The held-out groups of the newest evaluation round, played or not.
CREATE OR REPLACE VIEW newest_round AS
SELECT * FROM groups WHERE split = 'heldout'
QUALIFY evaluated_version = max(evaluated_version) OVER ();

-- The whole held-out groups of the newest evaluation round that has any.
CREATE OR REPLACE VIEW newest_results AS
SELECT * FROM groups WHERE split = 'heldout' AND state = 'complete' AND n_members > 0
QUALIFY evaluated_version = max(evaluated_version) OVER ();

-- The training tasks that were handed out, and what is known of each now. An SQL text for
-- `tasks.order` can be tried on it.
CREATE OR REPLACE VIEW tasks AS
SELECT task_id, count(*) AS n_groups,
       coalesce(sum(size) FILTER (is_whole), 0)::BIGINT AS n_episodes,
       sum(n_won) FILTER (is_whole) / sum(size) FILTER (is_whole) AS success,
       arg_max(n_won / size, (completed_at, ordinal)) FILTER (is_whole) AS last_success,
       sum(return_sum) FILTER (is_whole) / sum(size) FILTER (is_whole) AS mean_return,
       (SELECT max(ordinal) FROM groups WHERE split = 'train') - max(ordinal) AS groups_since,
       (SELECT max(version) FROM exported.versions)
           - arg_max(version_max, (completed_at, ordinal)) FILTER (is_whole) AS staleness
FROM (SELECT *, completed_at IS NOT NULL AS is_whole FROM groups WHERE split = 'train')
GROUP BY task_id;

-- Each state that a group was in: when, since which lsn, and why.
CREATE OR REPLACE VIEW ledger AS
SELECT group_uid::UUID AS group_uid, state, reason, lsn, "at" AS entered_at FROM exported.ledger;

-- Attempts at an episode that gave no trajectory: how far they got, and why they ended.
CREATE OR REPLACE VIEW unfinished AS
SELECT * EXCLUDE (lsn) REPLACE (group_uid::UUID AS group_uid) FROM exported.unfinished;

-- GiGPO's anchor groups: the steps of one group that were taken in the same state. A step without
-- an anchor is in none.
CREATE OR REPLACE VIEW anchor_groups AS
SELECT group_uid, state_hash, any_value(anchor_text) AS anchor_text,
       any_value(task_id) AS task_id, any_value(split) AS split, count(*) AS n_steps,
       count(DISTINCT traj_uid) AS n_trajectories,
       min(version_min) AS version_min, max(version_max) AS version_max
FROM steps WHERE state_hash IS NOT NULL GROUP BY group_uid, state_hash;

CREATE OR REPLACE VIEW versions AS FROM exported.versions;
CREATE OR REPLACE VIEW checkpoints AS FROM exported.checkpoints;
CREATE OR REPLACE VIEW components AS FROM exported.component;
CREATE OR REPLACE VIEW events AS SELECT "at" AS logged_at, * EXCLUDE ("at") FROM exported.events;

-- The weights that each worker loaded, and for how long its generation paused. The phases are those
-- of `WeightLoad` in actors/inference/weight_load.py. An event of another form gives NULL and 0.
CREATE OR REPLACE VIEW weight_loads AS
SELECT component AS worker, logged_at AS loaded_at, load.version,
       coalesce(list_sum([load.pause_ms, load.start_ms, load.update_ms, load.finish_ms,
                          load.resume_ms]), 0) AS pause_ms
FROM (
    SELECT component, logged_at, json_transform(
        try_cast(detail AS JSON),
        '{"version": "BIGINT", "pause_ms": "DOUBLE", "start_ms": "DOUBLE", "update_ms": "DOUBLE",
          "finish_ms": "DOUBLE", "resume_ms": "DOUBLE"}') AS load
    FROM events WHERE what = 'weights loaded');

-- The rows whose loss or log-probabilities were not finite, so that their update was skipped. Of
-- one update at most 100 are named (MAX_ROWS_NAMED in learner/training/run_health.py).
CREATE OR REPLACE VIEW bad_rows AS
SELECT learner_step, number AS update_number, try_cast(bad.traj_uid AS UUID) AS traj_uid,
       bad.step_index
FROM (
    SELECT found.learner_step, found.number, unnest(found.rows) AS bad
    FROM (SELECT json_transform(
              try_cast(detail AS JSON),
              '{"learner_step": "BIGINT", "number": "BIGINT",
                "rows": [{"traj_uid": "VARCHAR", "step_index": "INTEGER"}]}') AS found
          FROM events WHERE what = 'bad rows'));

-- The groups that each learner step consumed, what became of them, and the digests of the weights
-- that wrote them. `use` numbers the uses of a group, from 1. Each row here trains on a whole
-- group. Later uses of this run's own groups replay their wins only, and are in `replays`. The
-- source of an offline group is the run that played it. Its versions are that run's, so it has no
-- staleness and no digests here.
CREATE OR REPLACE VIEW lineage AS
SELECT l.* EXCLUDE (changed_lsn) REPLACE (group_uid::UUID AS group_uid),
       o.digest AS oldest_weights_digest, n.digest AS newest_weights_digest
FROM (
    FROM exported.lineage WHERE use = 1 OR source IS NOT NULL
    QUALIFY row_number() OVER (PARTITION BY batch_id, group_uid ORDER BY changed_lsn DESC) = 1
) AS l
LEFT JOIN versions AS o ON o.version = l.version_min AND l.source IS NULL
LEFT JOIN versions AS n ON n.version = l.version_max AND l.source IS NULL;

-- The critic's value of the state of each step, as the learner step computed it before its updates.
-- A group that was trained on several times has values of each time.
CREATE OR REPLACE VIEW critic_values AS
SELECT b.learner_step, v.batch_id, v.traj_uid::UUID AS traj_uid,
       generate_subscripts(v.listed, 1) - 1 AS step_index, unnest(v.listed) AS value
FROM (SELECT *, TRY_CAST(state_values AS DOUBLE[]) AS listed FROM exported.critic) AS v
JOIN (SELECT DISTINCT batch_id, learner_step FROM lineage WHERE batch_state = 'trained') AS b
    ON v.batch_id = b.batch_id;

-- The steps that have a value, with the newest one, for the advantages of a run with a critic.
CREATE OR REPLACE VIEW valued_steps AS
SELECT s.*, v.value
FROM steps AS s JOIN (
    SELECT traj_uid, step_index, max_by(value, batch_id) AS value
    FROM critic_values GROUP BY ALL) AS v
    ON s.traj_uid = v.traj_uid AND s.step_index = v.step_index;

-- The groups whose wins a learner step trained on again, and how many versions old they were. Use 1
-- is the learner step that trained on the whole group: it is in `lineage`.
CREATE OR REPLACE VIEW replays AS
SELECT learner_step, batch_id, batch_state, live, group_uid::UUID AS group_uid, task_id, use,
       version_min, version_max, version_in, version_in - version_min AS age, claimed_at, trained_at
FROM (
    FROM exported.lineage WHERE use > 1 AND source IS NULL
    QUALIFY row_number() OVER (PARTITION BY batch_id, group_uid ORDER BY changed_lsn DESC) = 1
);

CREATE OR REPLACE VIEW metrics AS
SELECT * EXCLUDE (live, lsn, changed_lsn)
FROM (
    FROM exported.metrics
    QUALIFY row_number() OVER (
        PARTITION BY learner_step, policy_version, name, lsn ORDER BY changed_lsn DESC) = 1)
WHERE live
QUALIFY row_number() OVER (PARTITION BY learner_step, policy_version, name ORDER BY lsn DESC) = 1;

-- Must be empty: groups that were trained on although they were staler than the run allows.
CREATE OR REPLACE VIEW staleness_violations AS
SELECT * FROM lineage
WHERE batch_state = 'trained' AND staleness > getvariable('max_staleness');

-- Must be empty: tasks that were both trained on and held out.
CREATE OR REPLACE VIEW task_overlap AS
SELECT task_id FROM groups WHERE split IN ('train', 'heldout') OR source IS NOT NULL
GROUP BY task_id HAVING count(DISTINCT split = 'heldout') > 1;

-- For each learner step, the fraction of the time from claim to settlement in which at least one
-- request was being generated. Requests in order of their begin each add what the ones before have
-- not covered. A condition on learner_step spares most of the work.
CREATE OR REPLACE VIEW generation_overlap AS
WITH training AS (
    SELECT DISTINCT learner_step, epoch_us(claimed_at) AS claimed_us,
           epoch_us(trained_at) AS trained_us
    FROM lineage WHERE batch_state = 'trained'
),
beside AS (
    SELECT t.*, r.begin_us, r.end_us, max(r.end_us) OVER (
               PARTITION BY learner_step, claimed_us ORDER BY r.begin_us
               ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS covered_us
    FROM training AS t LEFT JOIN (
        SELECT epoch_us(t_start) AS begin_us, epoch_us(t_start) + gen_us AS end_us
        FROM steps WHERE split <> 'imported') AS r
        ON r.begin_us < t.trained_us AND r.end_us > t.claimed_us
)
SELECT learner_step, (trained_us - claimed_us) / 1e6 AS training_s,
       coalesce(
           sum(greatest(0, least(end_us, trained_us) - greatest(begin_us, claimed_us, covered_us)))
               FILTER (begin_us IS NOT NULL), 0) / (trained_us - claimed_us) AS fraction
FROM beside GROUP BY learner_step, claimed_us, trained_us;
