-- Value of the state that each step was taken in, and of the state that it led to. The nodes are
-- the anchor groups of one task; a step without a key is a node of its own. So a value needs no
-- critic: it is the mean outcome of the steps taken there,
--   V(s) = mean of o_t over the steps in s.
--   g2po    o_t = gamma^(T - t) R(tau), for t from 0 and T steps: arXiv 2606.22995, in the form of
--           its authors' code
--   gagpo   o_t = R_t, eq. 5: arXiv 2605.13217, in our form after its abstract
-- After the last step: g2po has a node for success, where o = R(tau), so 10 where winning pays 10;
-- after a loss the value is 0. gagpo has 0, because the last reward has been paid.
-- Penalties are in no value.
-- Values that should be equal may differ by rounding, because they are means over many steps and
-- sums of them: `tolerance` is a thousand times the rounding of a return. For g2po and gagpo only.
-- in:  anchor_keys, trajectories, episodes; estimator, gamma
-- out: anchor_keys' columns but is_final and context, node_size BIGINT, node_value DOUBLE,
--      next_value DOUBLE, tolerance DOUBLE, is_last BOOLEAN
WITH ends AS (
    SELECT
        trajectories.traj_uid,
        n_steps,
        episode_return,
        -- the column won is read for g2po only
        CASE WHEN estimator = 'g2po' AND won IS NULL
            THEN error(format('g2po needs to know whether trajectory {} was won; '
                || 'give `steps` a column won',
                trajectories.traj_uid::VARCHAR))
            ELSE won
        END AS is_won,
        AVG(episode_return) FILTER (won) OVER task AS success_value,
        1000 * MAX(trajectories.rounding) OVER task AS tolerance
    FROM trajectories
    JOIN episodes ON trajectories.traj_uid = episodes.traj_uid AND episodes.is_counted = 1
    WHERE estimator IN ('g2po', 'gagpo')
    WINDOW task AS (PARTITION BY trajectories.group_uid)
),
outcomes AS MATERIALIZED (
    SELECT
        anchor_keys.* EXCLUDE (is_final, context),
        tolerance,
        step_index = n_steps - 1 AS is_last,
        CASE
            WHEN NOT is_last THEN NULL
            WHEN estimator = 'g2po' AND is_won THEN success_value
            ELSE 0
        END AS last_value,
        CASE estimator
            WHEN 'g2po' THEN gamma::DOUBLE ** (n_steps - step_index) * episode_return
            ELSE raw_return
        END AS outcome
    FROM anchor_keys
    JOIN ends ON anchor_keys.traj_uid = ends.traj_uid
),
nodes AS (
    SELECT
        group_uid,
        state_key,
        refinement,
        COUNT(*) AS node_size,
        AVG(outcome) AS node_value
    FROM outcomes
    WHERE refinement IS NOT NULL
    GROUP BY group_uid, state_key, refinement
),
valued AS MATERIALIZED (
    SELECT
        outcomes.* EXCLUDE (outcome),
        COALESCE(node_size, 1) AS node_size,
        COALESCE(node_value, outcome) AS node_value
    FROM outcomes
    LEFT JOIN nodes
        ON outcomes.group_uid = nodes.group_uid
        AND outcomes.state_key IS NOT DISTINCT FROM nodes.state_key
        AND outcomes.refinement = nodes.refinement
)
SELECT
    valued.* EXCLUDE (last_value),
    COALESCE(valued.last_value, later.node_value) AS next_value
FROM valued
LEFT JOIN valued AS later
    ON valued.traj_uid = later.traj_uid AND valued.step_index + 1 = later.step_index
