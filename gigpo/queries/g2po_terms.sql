-- G2PO (arXiv 2606.22995), in the form of its authors' code: the step advantage is the sum of the
-- two terms of comparisons.sql. step_return and spread are those of the first. For g2po only.
-- in:  step_advantage
-- out: the columns of hierarchy
SELECT
    group_uid,
    traj_uid,
    step_index,
    ANY_VALUE(is_action_valid) AS is_action_valid,
    ANY_VALUE(step_return) FILTER (term = 1) AS step_return,
    SUM(step_advantage) AS step_advantage,
    MAX(spread) AS spread,
    ANY_VALUE(node_size) AS anchor_size
FROM step_advantage
GROUP BY group_uid, traj_uid, step_index
