-- Distance-to-success returns, after GraphGPO (ICML 2026); docs/algorithms.md, section 3, lists the
-- differences. The states that one group met are the nodes of a directed graph. Each step is an
-- edge to the next state; the last step of a won trajectory is an edge to 'success'.
-- d(s) = edges on the shortest path from s to 'success'; the return of a step that led to s' is
--   scale * 0.1 ^ d(s'),  0 where no path is known.
-- 0.1 is the authors' factor for ALFWorld (0.2 for WebShop, 0.8 for Sokoban). It is not `gamma`,
-- which belongs to eq. 5. The published scale is 10, the reward of success there. Here it is the
-- largest return of a won trajectory of the group, so 10 where winning pays 10. A scale that is not
-- positive is refused: "near success" would then mean "worse".
-- A node is a state_hash for every `anchor`, which decides what is compared, not what is connected.
-- A step without a state hash is a node of its own. For graphgpo only; it needs the column won.
-- in:  base, trajectories, returns
-- out: returns' columns, with the graph's return for step_return
WITH RECURSIVE nodes AS (
    SELECT
        group_uid,
        traj_uid,
        step_index,
        COALESCE(
            'state ' || state_hash::VARCHAR, format('step {} of {}', step_index, traj_uid::VARCHAR)
        ) AS node
    FROM base
),
edges AS (
    SELECT
        nodes.group_uid,
        nodes.traj_uid,
        nodes.step_index,
        nodes.node,
        CASE
            WHEN trajectories.won IS NULL
                THEN error(format('graphgpo needs to know whether trajectory {} was won; '
                    || 'give `steps` a column won',
                    nodes.traj_uid::VARCHAR))
            WHEN later.node IS NOT NULL THEN later.node
            WHEN trajectories.won THEN 'success'
        END AS next_node
    FROM nodes
    JOIN trajectories USING (traj_uid)
    LEFT JOIN nodes AS later
        ON nodes.traj_uid = later.traj_uid AND nodes.step_index + 1 = later.step_index
),
-- Breadth-first search from 'success' against the edges: round d finds the nodes at distance d.
distances(group_uid, node, distance) USING KEY (group_uid, node) AS (
    SELECT DISTINCT group_uid, 'success', 0 FROM edges WHERE next_node = 'success'
    UNION ALL
    SELECT edges.group_uid, edges.node, MIN(distances.distance) + 1
    FROM distances
    JOIN edges ON edges.group_uid = distances.group_uid AND edges.next_node = distances.node
    LEFT JOIN recurring.distances AS known
        ON known.group_uid = edges.group_uid AND known.node = edges.node
    WHERE known.node IS NULL
    GROUP BY edges.group_uid, edges.node
),
scales AS (
    SELECT
        trajectories.group_uid,
        CASE WHEN MAX(reward_to_go) > 0 THEN MAX(reward_to_go) ELSE error(format(
            'graphgpo needs winning to pay more than it costs; the best won trajectory of group {} '
            || 'returned {}',
            trajectories.group_uid::VARCHAR, MAX(reward_to_go))) END AS scale
    FROM returns
    JOIN trajectories USING (traj_uid)
    WHERE step_index = 0 AND trajectories.won
    GROUP BY trajectories.group_uid
)
SELECT returns.* REPLACE (COALESCE(scale * 0.1::DOUBLE ** distance, 0) AS step_return)
FROM returns
JOIN edges ON edges.traj_uid = returns.traj_uid AND edges.step_index = returns.step_index
LEFT JOIN scales ON scales.group_uid = edges.group_uid
LEFT JOIN distances ON distances.group_uid = edges.group_uid AND distances.node = edges.next_node
