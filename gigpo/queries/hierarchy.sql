-- HGPO (ICLR 2026), in the form of its authors' code: a step is compared within nested anchor
-- groups, those of its last 1, 2, ... K + 1 states. Longer shared histories count more:
--   A_S = sum(w_k A_k) / sum(w_k),  w_k = k + 1 (alpha = 1),
-- over the suffixes whose advantage is not 0, as in the authors' code; without any: 0. Advantages
-- up to 1e-9 count as 0, because a middle return that is one ulp off the mean must not move the
-- weights. anchor_size is that of the state alone. For hgpo only; the other estimators have one
-- line per step already.
-- in:  step_advantage
-- out: group_uid, traj_uid, step_index, is_action_valid, step_return, step_advantage,
--      spread DOUBLE, anchor_size BIGINT
SELECT
    group_uid,
    traj_uid,
    step_index,
    ANY_VALUE(is_action_valid) AS is_action_valid,
    ANY_VALUE(step_return) AS step_return,
    COALESCE(
        SUM((n_states + 1) * step_advantage) FILTER (abs(step_advantage) > 1e-9)
        / SUM(n_states + 1) FILTER (abs(step_advantage) > 1e-9),
        0
    ) AS step_advantage,
    MAX(spread) AS spread,
    MAX(anchor_size) AS anchor_size
FROM step_advantage
GROUP BY group_uid, traj_uid, step_index
