-- Quantities that the step term compares, and the steps that each is compared with. Sources: eq. 7;
-- G2PO, arXiv 2606.22995, and GraphGPO, arXiv 2605.26684, in the form of their authors' code;
-- GAGPO, arXiv 2605.13217, in our form after its abstract.
--   g2po       two lines a step. V(s') within the anchor group, and V(s') - V(s), the temporal
--              difference, within the whole task group: it has a value in a state met once, too.
--              Temporal differences of equal episodes differ along the way, so they do not count as
--              a difference between episodes (raw_return 0).
--   gagpo      the estimated advantage of gae.sql, within the whole task group
--   graphgpo   the return of graph_returns.sql, within the anchor group
--   otherwise  the return, within the anchor group
-- A penalty is subtracted from the row of an invalid action; not twice for g2po (authors' code).
-- in:  anchor_keys, graph_returns, node_values, gae; estimator, invalid_penalty
-- out: anchor_keys' columns but is_final and context, node_size BIGINT (steps in the anchor group;
--      NULL: as many as are compared), tolerance DOUBLE (values this close are equal), term INTEGER
--      (1, or 2 for the second line of g2po)
-- A comparison within the whole group has no state: `CASE WHEN false THEN state_key END` is a NULL
-- of state_key's own type, so that the union keeps that type.
WITH returns_of_steps AS (
    FROM anchor_keys WHERE (estimator IN ('graphgpo', 'g2po', 'gagpo')) IS NOT TRUE
    UNION ALL BY NAME
    FROM graph_returns WHERE estimator = 'graphgpo'
),
next_values AS (
    SELECT * EXCLUDE (node_value, next_value, is_last) REPLACE (
        next_value AS raw_return,
        next_value - CASE WHEN is_action_valid THEN 0 ELSE invalid_penalty::DOUBLE
        END AS step_return
    )
    FROM node_values
    WHERE estimator = 'g2po'
),
temporal_differences AS (
    SELECT * EXCLUDE (node_value, next_value, is_last) REPLACE (
        0::DOUBLE AS raw_return,
        next_value - node_value AS step_return,
        CASE WHEN false THEN state_key END AS state_key,
        'whole group' AS refinement
    )
    FROM node_values
    WHERE estimator = 'g2po'
),
estimated_advantages AS (
    SELECT node_values.* EXCLUDE (node_value, next_value, is_last) REPLACE (
        gae AS raw_return,
        gae - CASE WHEN node_values.is_action_valid THEN 0 ELSE invalid_penalty::DOUBLE
        END AS step_return,
        CASE WHEN false THEN state_key END AS state_key,
        'whole group' AS refinement
    )
    FROM node_values
    JOIN gae
        ON node_values.traj_uid = gae.traj_uid AND node_values.step_index = gae.step_index
    WHERE estimator = 'gagpo'
)
SELECT * EXCLUDE (is_final, context), NULL::BIGINT AS node_size, 0::DOUBLE AS tolerance, 1 AS term
FROM returns_of_steps
UNION ALL BY NAME
SELECT *, 1 AS term FROM next_values
UNION ALL BY NAME
SELECT *, 2 AS term FROM temporal_differences
UNION ALL BY NAME
SELECT *, 1 AS term FROM estimated_advantages
