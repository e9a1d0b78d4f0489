-- The narrow relation every other query stands on: one row per step, only what the equations name.
-- in:  checked(group_uid, traj_uid, step_index, reward, is_action_valid, state_hash, ...); keys of any type that compares.
--      Optional, NULL where the table lacks them: version_min, weight, won, anchor_key, admissible_actions
-- out: group_uid, traj_uid, state_hash as they came (state_hash NULL = this step has no anchor state),
--      step_index BIGINT, reward DOUBLE, is_action_valid BOOLEAN, version_min BIGINT (oldest policy version of the step),
--      weight DOUBLE (importance weight), won BOOLEAN, anchor_key VARCHAR, admissible_actions VARCHAR[]
-- It is materialised by the caller: recursing over a Parquet view would read the files once per step of an episode.
-- The second part of the union has no rows; it only lends its columns. What a call does not use is never read.
SELECT
    group_uid,
    traj_uid,
    step_index::BIGINT AS step_index,
    reward::DOUBLE AS reward,
    is_action_valid::BOOLEAN AS is_action_valid,
    state_hash,
    version_min::BIGINT AS version_min,
    weight::DOUBLE AS weight,
    won::BOOLEAN AS won,
    anchor_key::VARCHAR AS anchor_key,
    admissible_actions::VARCHAR[] AS admissible_actions
FROM (
    FROM checked
    UNION ALL BY NAME
    SELECT
        NULL::BIGINT AS version_min,
        NULL::DOUBLE AS weight,
        NULL::BOOLEAN AS won,
        NULL AS anchor_key,
        NULL::VARCHAR[] AS admissible_actions
    WHERE false
)
