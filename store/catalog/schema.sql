-- The tables of catalog.sqlite. Times are UTC epoch microseconds. The order of changes is the lsn.
-- These tables are append-only: group_state, unfinished, batch, batch_group, version, checkpoint,
-- critic_value, metric, event, lost_trajectory. A roll-back sets live = 0, and triggers refuse
-- every DELETE.
-- Triggers also set changed_lsn, by which an export finds the rows that changed since the last one.

CREATE TABLE IF NOT EXISTS meta (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    run_id TEXT NOT NULL,
    epoch INTEGER NOT NULL,  -- one more for each owner; earlier owners and their leases are fenced
    lsn INTEGER NOT NULL,    -- one more for each transaction that changes an exported table
    horizon_lsn INTEGER NOT NULL DEFAULT 0  -- snapshots before it need files that were removed
) STRICT;

-- The lsn of the last change of each exported table.
CREATE TABLE IF NOT EXISTS changed (
    name TEXT PRIMARY KEY,
    lsn INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS segment (
    segment_id TEXT PRIMARY KEY,
    path TEXT NOT NULL UNIQUE,
    digest TEXT NOT NULL,
    n_steps INTEGER NOT NULL,
    n_bytes INTEGER NOT NULL,
    worker TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    lsn INTEGER NOT NULL,
    retired_lsn INTEGER,  -- later snapshots do not contain it; the file stays for older ones
    committed_us INTEGER NOT NULL,
    level INTEGER NOT NULL DEFAULT 0,  -- how often its rows were merged; 0: a worker wrote it
    retired_us INTEGER,
    retired_why TEXT CHECK (retired_why IN ('compacted', 'expired', 'quarantined')),
    removed_us INTEGER  -- when the file was removed
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS segment_by_lsn ON segment (lsn);
CREATE INDEX IF NOT EXISTS segment_live ON segment (level, lsn) WHERE retired_lsn IS NULL;
-- For the list of live segments, which every export asks for.
CREATE INDEX IF NOT EXISTS segment_shown ON segment (lsn, path, retired_lsn)
    WHERE retired_lsn IS NULL;
CREATE INDEX IF NOT EXISTS segment_retired ON segment (retired_lsn)
    WHERE retired_lsn IS NOT NULL AND removed_us IS NULL;

CREATE TABLE IF NOT EXISTS grp (
    group_uid BLOB PRIMARY KEY,
    split TEXT NOT NULL CHECK (split IN ('train', 'heldout', 'imported')),
    ordinal INTEGER NOT NULL,
    task_id TEXT NOT NULL,
    size INTEGER NOT NULL,
    evaluated_version INTEGER,  -- the version that its round evaluates; NULL for training groups
    state TEXT NOT NULL CHECK (state IN (
        'open', 'complete', 'claimed', 'trained', 'stale', 'filtered', 'abandoned')),
    reason TEXT,
    -- Sums over its committed trajectories. The transaction that inserts those updates them.
    n_members INTEGER NOT NULL,
    n_steps INTEGER NOT NULL,
    n_won INTEGER NOT NULL,
    return_sum REAL NOT NULL,
    version_min INTEGER,
    version_max INTEGER,
    opened_lsn INTEGER NOT NULL,
    opened_us INTEGER NOT NULL,
    completed_lsn INTEGER,
    completed_us INTEGER,
    lease_worker TEXT,
    lease_until_us INTEGER,
    changed_lsn INTEGER NOT NULL DEFAULT 0,
    -- The run that played an offline group. Imported groups without a source are not trained on.
    source TEXT CHECK (source IS NULL OR split = 'imported'),
    -- Of a training group whose task was drawn by weight (tasks.order): the weight, the success of
    -- the task's latest whole group, and the lsn up to which results counted.
    weight REAL,
    success_before REAL,
    weighed_lsn INTEGER,
    CHECK ((evaluated_version IS NOT NULL) = (split = 'heldout'))
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS grp_by_state ON grp (split, state, version_min, ordinal);
CREATE INDEX IF NOT EXISTS grp_by_ordinal ON grp (split, evaluated_version, ordinal);
CREATE INDEX IF NOT EXISTS grp_by_completion ON grp (completed_lsn);
CREATE INDEX IF NOT EXISTS grp_by_change ON grp (changed_lsn);
CREATE INDEX IF NOT EXISTS grp_open ON grp (opened_lsn) WHERE state = 'open';
CREATE INDEX IF NOT EXISTS grp_offline ON grp (ordinal) WHERE source IS NOT NULL;
CREATE INDEX IF NOT EXISTS grp_leased ON grp (lease_worker) WHERE lease_worker IS NOT NULL;
CREATE INDEX IF NOT EXISTS grp_lease_end ON grp (lease_until_us) WHERE lease_until_us IS NOT NULL;
CREATE INDEX IF NOT EXISTS grp_free ON grp (split, opened_lsn, ordinal)
    WHERE state = 'open' AND lease_until_us IS NULL;

-- Each state that a group was in, with the reason. Only the triggers below write it.
CREATE TABLE IF NOT EXISTS group_state (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    group_uid BLOB NOT NULL REFERENCES grp,
    state TEXT NOT NULL,
    reason TEXT NOT NULL,
    lsn INTEGER NOT NULL,
    at_us INTEGER NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS group_state_by_group ON group_state (group_uid, seq);
CREATE INDEX IF NOT EXISTS group_state_by_lsn ON group_state (lsn);

CREATE TRIGGER IF NOT EXISTS grp_inserted AFTER INSERT ON grp BEGIN
    UPDATE grp SET changed_lsn = (SELECT lsn + 1 FROM meta) WHERE group_uid = NEW.group_uid;
    INSERT INTO group_state (group_uid, state, reason, lsn, at_us)
    VALUES (NEW.group_uid, NEW.state, coalesce(NEW.reason, 'dispatched'),
            (SELECT lsn + 1 FROM meta), now_us());
END;
CREATE TRIGGER IF NOT EXISTS grp_changed
AFTER UPDATE OF state, reason, n_members, n_steps, source ON grp BEGIN
    UPDATE grp SET changed_lsn = (SELECT lsn + 1 FROM meta) WHERE group_uid = NEW.group_uid;
END;
CREATE TRIGGER IF NOT EXISTS grp_state_changed
AFTER UPDATE OF state ON grp WHEN OLD.state <> NEW.state BEGIN
    INSERT INTO group_state (group_uid, state, reason, lsn, at_us)
    VALUES (NEW.group_uid, NEW.state, coalesce(NEW.reason, NEW.state),
            (SELECT lsn + 1 FROM meta), now_us());
END;

CREATE TABLE IF NOT EXISTS trajectory (
    traj_uid BLOB PRIMARY KEY,  -- fixed before generation, so that a retry collides here
    group_uid BLOB NOT NULL REFERENCES grp,
    member INTEGER NOT NULL,
    segment_id TEXT NOT NULL REFERENCES segment,  -- the one file whose rows count
    n_steps INTEGER NOT NULL,
    episode_return REAL NOT NULL,
    won INTEGER NOT NULL,
    task_score REAL,
    invalid_steps INTEGER NOT NULL,
    version_min INTEGER NOT NULL,
    version_max INTEGER NOT NULL,
    lsn INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX IF NOT EXISTS trajectory_by_member ON trajectory (group_uid, member);
CREATE INDEX IF NOT EXISTS trajectory_by_segment ON trajectory (segment_id);

-- Trajectories that were committed, and whose file was later found damaged or missing.
CREATE TABLE IF NOT EXISTS lost_trajectory (
    traj_uid BLOB NOT NULL,
    group_uid BLOB NOT NULL REFERENCES grp,
    member INTEGER NOT NULL,
    segment_id TEXT NOT NULL REFERENCES segment,
    reason TEXT NOT NULL,
    lsn INTEGER NOT NULL,
    PRIMARY KEY (traj_uid, lsn)
) STRICT, WITHOUT ROWID;

-- Attempts at an episode that gave no trajectory. They have no uid and are never trained on.
CREATE TABLE IF NOT EXISTS unfinished (
    unfinished_id INTEGER PRIMARY KEY AUTOINCREMENT,
    group_uid BLOB NOT NULL REFERENCES grp,
    number INTEGER NOT NULL,   -- of the episode in its group; from its size on: extra
    worker TEXT NOT NULL,
    version INTEGER NOT NULL,  -- newest published version when its group was leased
    begun_us INTEGER NOT NULL,
    ended_us INTEGER NOT NULL,
    n_steps INTEGER,           -- steps until then; NULL: unknown, its worker was lost
    n_response_tokens INTEGER,
    why TEXT NOT NULL CHECK (why IN (
        'straggler', 'failed', 'group_failed', 'too_old', 'stopped', 'worker_failed',
        'worker_lost')),
    lsn INTEGER NOT NULL,
    CHECK ((n_steps IS NULL) = (n_response_tokens IS NULL))
) STRICT;
CREATE INDEX IF NOT EXISTS unfinished_by_lsn ON unfinished (lsn);

-- Trajectories whose rows in this segment do not count, because another segment holds them.
CREATE TABLE IF NOT EXISTS duplicate (
    segment_id TEXT NOT NULL REFERENCES segment,
    traj_uid BLOB NOT NULL,
    PRIMARY KEY (segment_id, traj_uid)
) STRICT, WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS batch (
    batch_id INTEGER PRIMARY KEY AUTOINCREMENT,
    epoch INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('claimed', 'trained', 'rolled_back')),
    claimed_version INTEGER NOT NULL,  -- the learner's version when it claimed
    version_in INTEGER,                -- the learner's version when it trained
    learner_step INTEGER,
    claimed_us INTEGER NOT NULL,
    trained_us INTEGER,
    claimed_lsn INTEGER NOT NULL,
    trained_lsn INTEGER,
    rolled_back_lsn INTEGER
) STRICT;
CREATE UNIQUE INDEX IF NOT EXISTS batch_by_step ON batch (learner_step) WHERE state = 'trained';
CREATE INDEX IF NOT EXISTS batch_claimed ON batch (batch_id) WHERE state = 'claimed';

CREATE TABLE IF NOT EXISTS batch_group (
    batch_id INTEGER NOT NULL REFERENCES batch,
    group_uid BLOB NOT NULL REFERENCES grp,
    live INTEGER NOT NULL CHECK (live IN (0, 1)),
    -- 'filtered' already in a claimed batch that asked for another group in its place
    outcome TEXT NOT NULL CHECK (outcome IN ('claimed', 'trained', 'filtered')),
    -- Versions of the group when it was claimed. Members may be lost and played again later.
    version_min INTEGER NOT NULL DEFAULT 0,
    version_max INTEGER NOT NULL DEFAULT 0,
    changed_lsn INTEGER NOT NULL DEFAULT 0,
    -- The number of this use of the group, from 1. Use 1 trains on the whole group, and so does
    -- each later use of an offline group. A later use of a group of this run replays its wins only.
    use INTEGER NOT NULL DEFAULT 1,
    PRIMARY KEY (batch_id, group_uid)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS batch_group_by_change ON batch_group (changed_lsn);
CREATE UNIQUE INDEX IF NOT EXISTS batch_group_once ON batch_group (group_uid, use) WHERE live = 1;

-- The values by which a learner step's advantages were computed, of a run with a critic.
CREATE TABLE IF NOT EXISTS critic_value (
    batch_id INTEGER NOT NULL REFERENCES batch,
    traj_uid BLOB NOT NULL,
    state_values TEXT NOT NULL,  -- JSON: a list with the value of each step's state
    lsn INTEGER NOT NULL,
    PRIMARY KEY (batch_id, traj_uid)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS critic_value_by_lsn ON critic_value (lsn);

CREATE TABLE IF NOT EXISTS version (
    version INTEGER PRIMARY KEY,  -- never used again, also not after a roll-back
    path TEXT NOT NULL,
    digest TEXT NOT NULL,
    learner_step INTEGER,  -- NULL: no learner step made it (the base model)
    epoch INTEGER NOT NULL,
    published_us INTEGER NOT NULL,
    lsn INTEGER NOT NULL
) STRICT;

CREATE INDEX IF NOT EXISTS version_by_step ON version (learner_step, lsn);

-- The lsn of a checkpoint is that of the catalog when it was copied. The row comes when it is
-- written, with a changed_lsn of that time.
CREATE TABLE IF NOT EXISTS checkpoint (
    lsn INTEGER PRIMARY KEY,
    learner_step INTEGER NOT NULL,
    path TEXT NOT NULL,
    version INTEGER NOT NULL,
    live INTEGER NOT NULL CHECK (live IN (0, 1)),
    saved_us INTEGER NOT NULL,
    changed_lsn INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TABLE IF NOT EXISTS metric (
    learner_step INTEGER NOT NULL,
    policy_version INTEGER NOT NULL,
    name TEXT NOT NULL,
    value REAL NOT NULL,
    live INTEGER NOT NULL CHECK (live IN (0, 1)),
    lsn INTEGER NOT NULL,
    changed_lsn INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (learner_step, policy_version, name, lsn)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS metric_by_change ON metric (changed_lsn);
CREATE INDEX IF NOT EXISTS metric_by_name ON metric (name, live, learner_step, lsn);
CREATE INDEX IF NOT EXISTS metric_evaluated ON metric (policy_version)
    WHERE name = 'heldout/success';

CREATE TABLE IF NOT EXISTS component (
    name TEXT PRIMARY KEY,
    waiting_on TEXT,
    beat_us INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS event (
    event_id INTEGER PRIMARY KEY AUTOINCREMENT,
    lsn INTEGER NOT NULL,
    at_us INTEGER NOT NULL,
    component TEXT NOT NULL,
    what TEXT NOT NULL,
    detail TEXT NOT NULL
) STRICT;

-- Triggers that set changed_lsn, and that keep append-only tables from being changed.
CREATE TRIGGER IF NOT EXISTS batch_group_inserted AFTER INSERT ON batch_group BEGIN
    UPDATE batch_group SET changed_lsn = (SELECT lsn + 1 FROM meta)
    WHERE batch_id = NEW.batch_id AND group_uid = NEW.group_uid;
END;
CREATE TRIGGER IF NOT EXISTS batch_group_changed AFTER UPDATE OF live, outcome ON batch_group BEGIN
    UPDATE batch_group SET changed_lsn = (SELECT lsn + 1 FROM meta)
    WHERE batch_id = NEW.batch_id AND group_uid = NEW.group_uid;
END;
CREATE TRIGGER IF NOT EXISTS checkpoint_inserted AFTER INSERT ON checkpoint BEGIN
    UPDATE checkpoint SET changed_lsn = (SELECT lsn + 1 FROM meta) WHERE lsn = NEW.lsn;
END;
CREATE TRIGGER IF NOT EXISTS checkpoint_changed AFTER UPDATE OF live ON checkpoint BEGIN
    UPDATE checkpoint SET changed_lsn = (SELECT lsn + 1 FROM meta) WHERE lsn = NEW.lsn;
END;
CREATE TRIGGER IF NOT EXISTS metric_inserted AFTER INSERT ON metric BEGIN
    UPDATE metric SET changed_lsn = (SELECT lsn + 1 FROM meta)
    WHERE (learner_step, policy_version, name, lsn)
        = (NEW.learner_step, NEW.policy_version, NEW.name, NEW.lsn);
END;
CREATE TRIGGER IF NOT EXISTS metric_changed AFTER UPDATE OF live ON metric BEGIN
    UPDATE metric SET changed_lsn = (SELECT lsn + 1 FROM meta)
    WHERE (learner_step, policy_version, name, lsn)
        = (NEW.learner_step, NEW.policy_version, NEW.name, NEW.lsn);
END;
CREATE TRIGGER IF NOT EXISTS group_state_only_grows BEFORE DELETE ON group_state BEGIN
    SELECT RAISE(ABORT, 'group_state is append-only');
END;
CREATE TRIGGER IF NOT EXISTS unfinished_only_grows BEFORE DELETE ON unfinished BEGIN
    SELECT RAISE(ABORT, 'unfinished is append-only');
END;
CREATE TRIGGER IF NOT EXISTS batch_only_grows BEFORE DELETE ON batch BEGIN
    SELECT RAISE(ABORT, 'batch is append-only');
END;
CREATE TRIGGER IF NOT EXISTS batch_group_only_grows BEFORE DELETE ON batch_group BEGIN
    SELECT RAISE(ABORT, 'batch_group is append-only');
END;
CREATE TRIGGER IF NOT EXISTS critic_value_only_grows BEFORE DELETE ON critic_value BEGIN
    SELECT RAISE(ABORT, 'critic_value is append-only');
END;
CREATE TRIGGER IF NOT EXISTS version_only_grows BEFORE DELETE ON version BEGIN
    SELECT RAISE(ABORT, 'version is append-only');
END;
CREATE TRIGGER IF NOT EXISTS checkpoint_only_grows BEFORE DELETE ON checkpoint BEGIN
    SELECT RAISE(ABORT, 'checkpoint is append-only');
END;
CREATE TRIGGER IF NOT EXISTS metric_only_grows BEFORE DELETE ON metric BEGIN
    SELECT RAISE(ABORT, 'metric is append-only');
END;
CREATE TRIGGER IF NOT EXISTS event_only_grows BEFORE DELETE ON event BEGIN
    SELECT RAISE(ABORT, 'event is append-only');
END;
CREATE TRIGGER IF NOT EXISTS lost_trajectory_only_grows BEFORE DELETE ON lost_trajectory BEGIN
    SELECT RAISE(ABORT, 'lost_trajectory is append-only');
END;
CREATE TRIGGER IF NOT EXISTS group_state_is_history BEFORE UPDATE ON group_state BEGIN
    SELECT RAISE(ABORT, 'group_state is append-only');
END;
