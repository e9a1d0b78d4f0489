-- The narrow relation every other query stands on: one row per step, only what the equations name.
-- in:  steps(group_uid, traj_uid, step_index, reward, is_action_valid, state_hash, ...), uids and hash as UUID or 16 bytes
-- out: group_uid UUID, traj_uid UUID, step_index BIGINT, reward DOUBLE, is_action_valid BOOLEAN,
--      state_hash UUID (NULL = this step has no anchor state)
-- It is materialised by the caller: recursing over a Parquet view would read the files once per step of an episode.
SELECT
    group_uid::UUID AS group_uid,
    traj_uid::UUID AS traj_uid,
    step_index::BIGINT AS step_index,
    reward::DOUBLE AS reward,
    is_action_valid::BOOLEAN AS is_action_valid,
    state_hash::UUID AS state_hash
FROM steps
