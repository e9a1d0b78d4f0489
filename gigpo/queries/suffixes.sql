-- The last 1, 2, ... states of a step's trajectory, HGPO's contexts (ICLR 2026), in the form of its
-- authors' code: one line per step and suffix length. Anchor 'suffix' takes one length,
-- `anchor_history` states; near the beginning these are all states so far, which equal only other
-- beginnings. hgpo takes every length from 1 to `anchor_history`. The other anchors take the step's
-- own state, see scores.sql.
-- States are written as text after their length, so that different suffixes never read the same.
-- in:  scores; estimator, anchor_history
-- out: scores' columns, n_states BIGINT, earlier_states VARCHAR (the suffix without this step's own
--      state; NULL if one of them is unknown)
WITH histories AS (
    SELECT
        *,
        LIST(format('{}:{}', len(state_hash::VARCHAR), state_hash::VARCHAR)) OVER (
            PARTITION BY traj_uid
            ORDER BY step_index
            ROWS BETWEEN anchor_history::BIGINT - 1 PRECEDING AND 1 PRECEDING
        ) AS past
    FROM scores
)
SELECT
    histories.* EXCLUDE (past) REPLACE (
        lengths.n_states AS n_states,
        CASE
            WHEN lengths.n_states = 1 THEN ''
            WHEN list_count(past[1 - lengths.n_states:]) = lengths.n_states - 1
                THEN array_to_string(past[1 - lengths.n_states:], '')
        END AS earlier_states
    )
FROM histories
CROSS JOIN UNNEST(CASE
    WHEN estimator = 'hgpo' THEN range(1, LEAST(anchor_history::BIGINT, step_index + 1) + 1)
    ELSE [LEAST(anchor_history::BIGINT, step_index + 1)]
END) AS lengths(n_states)
