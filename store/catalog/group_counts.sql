-- Count the groups in each state, in a temporary table of the owner's connection. Triggers keep it
-- up to date: the status asks twice a second, and there may be hundreds of thousands of groups.
-- No file holds it, so each owner counts again from the groups.
PRAGMA temp_store = MEMORY;

CREATE TEMP TABLE group_count (
    split TEXT NOT NULL,
    state TEXT NOT NULL,
    n_groups INTEGER NOT NULL,
    n_members INTEGER NOT NULL,
    n_steps INTEGER NOT NULL,
    PRIMARY KEY (split, state)
) WITHOUT ROWID;

CREATE TEMP TRIGGER group_counted AFTER INSERT ON main.grp BEGIN
    INSERT INTO group_count VALUES (NEW.split, NEW.state, 1, NEW.n_members, NEW.n_steps)
    ON CONFLICT (split, state) DO UPDATE SET
        n_groups = n_groups + 1, n_members = n_members + excluded.n_members,
        n_steps = n_steps + excluded.n_steps;
END;
CREATE TEMP TRIGGER group_counted_again
AFTER UPDATE OF split, state, n_members, n_steps ON main.grp BEGIN
    UPDATE group_count
    SET n_groups = n_groups - 1, n_members = n_members - OLD.n_members,
        n_steps = n_steps - OLD.n_steps
    WHERE split = OLD.split AND state = OLD.state;
    INSERT INTO group_count VALUES (NEW.split, NEW.state, 1, NEW.n_members, NEW.n_steps)
    ON CONFLICT (split, state) DO UPDATE SET
        n_groups = n_groups + 1, n_members = n_members + excluded.n_members,
        n_steps = n_steps + excluded.n_steps;
END;

INSERT INTO group_count
SELECT split, state, count(*), sum(n_members), sum(n_steps) FROM main.grp GROUP BY split, state;
