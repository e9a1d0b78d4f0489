-- Distance-to-success returns of GraphGPO (arXiv 2605.26684), in the form of its authors' code. The
-- anchor groups of one task, of all policy versions, are the nodes of a directed graph, and each
-- step is an edge to the node of the next step. The last step of a won trajectory leads to
-- 'success', that of another one to the node of its final observation. Without a key, a step or a
-- final observation is a node of its own.
--   d(success) = 0
--   d(s)       = 1 + min of d(s') over the edges s -> s', where there is a path to 'success'
--   d(s)       = 1 + max of d over the group's nodes that have a path, where there is none
--   R_t        = 10 * graph_gamma ^ d(s_{t+1})
-- R_t is the return of a step that led to s_{t+1}. The 10 is the authors', whatever winning pays.
-- in:  anchor_keys; graph_gamma, invalid_penalty, estimator
-- out: anchor_keys' columns, of the steps alone, with the graph's raw_return and step_return
WITH RECURSIVE keyed AS MATERIALIZED (
    FROM anchor_keys WHERE estimator = 'graphgpo'
),
-- Nodes are numbers from here on: rounds of the search then compare nothing else.
node_numbers AS (
    SELECT group_uid, state_key, context, ROW_NUMBER() OVER () AS node
    FROM keyed
    WHERE context IS NOT NULL
    GROUP BY group_uid, state_key, context
),
-- A step or a final observation without a key gets a negative number of its own.
visits AS MATERIALIZED (
    SELECT keyed.*, COALESCE(node, -ROW_NUMBER() OVER ()) AS node
    FROM keyed
    LEFT JOIN node_numbers
        ON keyed.group_uid = node_numbers.group_uid
        AND keyed.state_key IS NOT DISTINCT FROM node_numbers.state_key
        AND keyed.context = node_numbers.context
),
-- One edge s_t -> s_{t+1} for each step. next_node is NULL where it led to 'success'.
edges AS MATERIALIZED (
    SELECT visits.*, later.node AS next_node
    FROM visits
    LEFT JOIN visits AS later
        ON visits.traj_uid = later.traj_uid AND visits.step_index + 1 = later.step_index
    WHERE NOT visits.is_final
),
distinct_edges AS MATERIALIZED (
    SELECT DISTINCT node, next_node FROM edges WHERE next_node IS NOT NULL
),
-- d(s) by breadth-first search from 'success' against the edges: round d finds the nodes at
-- distance d, so the first distance of a node is its smallest.
distances(node, distance) USING KEY (node) AS (
    SELECT DISTINCT node, 1 FROM edges WHERE next_node IS NULL
    UNION ALL
    SELECT distinct_edges.node, MIN(distances.distance) + 1
    FROM distances
    JOIN distinct_edges ON distinct_edges.next_node = distances.node
    LEFT JOIN recurring.distances AS known ON known.node = distinct_edges.node
    WHERE known.node IS NULL
    GROUP BY distinct_edges.node
),
farthest AS (
    SELECT group_uid, MAX(distance) AS distance
    FROM edges
    JOIN distances ON edges.node = distances.node
    GROUP BY group_uid
),
-- d(s_{t+1}) of each step; 1 where no node of the group has a path
measured AS (
    SELECT
        edges.*,
        CASE
            WHEN next_node IS NULL THEN 0
            ELSE COALESCE(distances.distance, farthest.distance + 1, 1)
        END AS next_distance
    FROM edges
    LEFT JOIN distances ON edges.next_node = distances.node
    LEFT JOIN farthest ON edges.group_uid = farthest.group_uid
),
returns_of_graph AS (
    SELECT * REPLACE (10 * graph_gamma::DOUBLE ** next_distance AS raw_return)
    FROM measured
)
SELECT * EXCLUDE (node, next_node, next_distance) REPLACE (
    CASE WHEN is_action_valid THEN raw_return ELSE raw_return - invalid_penalty::DOUBLE
    END AS step_return
)
FROM returns_of_graph
