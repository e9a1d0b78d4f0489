-- Distance-to-success returns of GraphGPO (arXiv 2605.26684), in the form of its authors' code. The
-- anchor groups of one task, of all policy versions, are the nodes of a directed graph, and each
-- step is an edge to the node of the next step. The last step of a won trajectory leads to
-- 'success', that of another one to the node of its final observation. Without a key, a step or a
-- final observation is a node of its own.
--   d(s) = edges on the shortest path from s to 'success'
-- and one more than the largest d of the group where there is no path. The return of a step that
-- led to s' is 10 * graph_gamma ^ d(s'). The 10 is the authors', whatever winning pays.
-- in:  anchor_keys; graph_gamma, invalid_penalty, estimator
-- out: anchor_keys' columns, of the steps alone, with the graph's raw_return and step_return
WITH RECURSIVE keyed AS MATERIALIZED (
    FROM anchor_keys WHERE estimator = 'graphgpo'
),
-- Nodes are numbers from here on: rounds of the search then compare nothing else.
numbers AS (
    SELECT group_uid, state_key, context, ROW_NUMBER() OVER () AS node
    FROM keyed
    WHERE context IS NOT NULL
    GROUP BY group_uid, state_key, context
),
visits AS MATERIALIZED (
    SELECT keyed.*, COALESCE(node, -ROW_NUMBER() OVER ()) AS node
    FROM keyed
    LEFT JOIN numbers
        ON keyed.group_uid = numbers.group_uid
        AND keyed.state_key IS NOT DISTINCT FROM numbers.state_key
        AND keyed.context = numbers.context
),
-- next_node is NULL where the step led to 'success'.
edges AS MATERIALIZED (
    SELECT visits.*, later.node AS next_node
    FROM visits
    LEFT JOIN visits AS later
        ON visits.traj_uid = later.traj_uid AND visits.step_index + 1 = later.step_index
    WHERE NOT visits.is_final
),
links AS MATERIALIZED (
    SELECT DISTINCT node, next_node FROM edges WHERE next_node IS NOT NULL
),
-- Breadth-first search from 'success' against the edges: round d finds the nodes at distance d.
distances(node, distance) USING KEY (node) AS (
    SELECT DISTINCT node, 1 FROM edges WHERE next_node IS NULL
    UNION ALL
    SELECT links.node, MIN(distances.distance) + 1
    FROM distances
    JOIN links ON links.next_node = distances.node
    LEFT JOIN recurring.distances AS known ON known.node = links.node
    WHERE known.node IS NULL
    GROUP BY links.node
),
farthest AS (
    SELECT group_uid, MAX(distance) AS distance
    FROM edges
    JOIN distances ON edges.node = distances.node
    GROUP BY group_uid
)
SELECT * REPLACE (
    CASE WHEN is_action_valid THEN raw_return ELSE raw_return - invalid_penalty::DOUBLE
    END AS step_return
)
FROM (
    SELECT edges.* EXCLUDE (node, next_node) REPLACE (
        10 * graph_gamma::DOUBLE ** CASE
            WHEN next_node IS NULL THEN 0
            ELSE COALESCE(distances.distance, farthest.distance + 1, 1)
        END AS raw_return
    )
    FROM edges
    LEFT JOIN distances ON edges.next_node = distances.node
    LEFT JOIN farthest ON edges.group_uid = farthest.group_uid
)
