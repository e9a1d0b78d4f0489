
-- Nodes and edges of the state graph. This goes on after the tables `steps` and `terms`.
, ranked AS (
    -- The states, from the most visited one: beyond $states they are one node, 'other'.
    SELECT
        state_hash,
        row_number() OVER (ORDER BY count(*) DESC, min(step_index), state_hash) AS rank
    FROM steps
    WHERE state_hash IS NOT NULL
    GROUP BY state_hash
),
named AS (
    -- Each step with its node, and with the node that its episode ends in. An episode that is not
    -- won ends in the state of its final observation, if that is stored and one that was visited.
    SELECT
        steps.*,
        CASE
            WHEN steps.state_hash IS NULL THEN 'none'
            WHEN visited.rank > $states THEN 'other'
            ELSE steps.state_hash::VARCHAR
        END AS node,
        CASE
            WHEN steps.won THEN 'won'
            WHEN final.rank > $states THEN 'other'
            WHEN final.rank IS NOT NULL THEN steps.final_state_hash::VARCHAR
            WHEN steps.truncated THEN 'cut off'
            ELSE 'lost'
        END AS ending
    FROM steps
    LEFT JOIN ranked AS visited ON steps.state_hash = visited.state_hash
    LEFT JOIN ranked AS final ON steps.final_state_hash = final.state_hash
),
moves AS (
    -- Step t leads from the node of t to that of t + 1, the last step to the episode's ending.
    SELECT
        *,
        lead(node) OVER by_step IS NULL AS is_last,
        coalesce(lead(node) OVER by_step, ending) AS leads_to
    FROM named
    WINDOW by_step AS (PARTITION BY traj_uid ORDER BY step_index)
)
-- One row for each (node, action, next node): means of R_t, eq. 5, and of A_S, eq. 7, of GiGPO
-- (arXiv 2505.10978) over the visits.
SELECT
    moves.node,
    min(left(moves.anchor_text, $characters)) AS state,
    left(moves.action_text, $characters) AS action,
    moves.leads_to,
    count(*) AS visits,
    count(DISTINCT moves.traj_uid) AS episodes,
    avg(terms.step_return) AS mean_return,
    avg(terms.step_advantage) AS step_advantage,
    avg(moves.won::INT) AS won,
    min(moves.step_index) AS first_step,
    count(*) FILTER (moves.step_index = 0) AS starts,
    count(*) FILTER (moves.is_last) AS ends,
    bool_and(moves.is_action_valid) AS is_valid,
    max(moves.group_uid::VARCHAR) AS group_uid
FROM moves
JOIN terms USING (traj_uid, step_index)
GROUP BY moves.node, action, moves.leads_to
ORDER BY visits DESC, first_step, moves.node, action, moves.leads_to
LIMIT $rows
