-- Read the columns of `steps` that the equations name: one row per step.
-- Whole numbers have an integer type and flags are BOOLEAN, or they are refused: a cast would make
-- step 0 of 0.4, and true of 0.3.
-- The caller materialises this relation, because recursing over a Parquet view would read the
-- files once per step of an episode. Columns that a call does not use are never read.
-- in:  checked(group_uid, traj_uid, step_index, reward, is_action_valid, state_hash, ...); keys of
--      any type that can be compared. Optional, NULL if missing: version_min, weight, won,
--      anchor_key, admissible_actions, value, and of the observation after a trajectory's last
--      action, in the row of its last step: final_state_hash, final_anchor_key,
--      final_admissible_actions
-- out: group_uid, traj_uid, state_hash as they came (state_hash NULL = no anchor state),
--      step_index BIGINT, reward DOUBLE, is_action_valid BOOLEAN,
--      version_min BIGINT (oldest policy version of the step), weight DOUBLE (importance weight),
--      won BOOLEAN, anchor_key VARCHAR, admissible_actions VARCHAR[], and the three final_ columns
--      of the same types, value DOUBLE (a critic's value of the state that the step was taken in)
WITH present AS (
    FROM checked
    UNION ALL BY NAME
    -- no rows: these are the columns that may be missing
    SELECT
        NULL AS version_min,
        NULL AS weight,
        NULL AS won,
        NULL AS anchor_key,
        NULL::VARCHAR[] AS admissible_actions,
        NULL AS final_state_hash,
        NULL AS final_anchor_key,
        NULL::VARCHAR[] AS final_admissible_actions,
        NULL AS value
    WHERE false
),
-- A NaN uid, hash or key is NULL, because some tools write missing values so.
without_nan AS (
    SELECT * REPLACE (
        CASE
            WHEN typeof(group_uid) IN ('FLOAT', 'DOUBLE')
                AND group_uid::VARCHAR = 'nan' THEN NULL
            ELSE group_uid
        END AS group_uid,
        CASE
            WHEN typeof(traj_uid) IN ('FLOAT', 'DOUBLE')
                AND traj_uid::VARCHAR = 'nan' THEN NULL
            ELSE traj_uid
        END AS traj_uid,
        CASE
            WHEN typeof(state_hash) IN ('FLOAT', 'DOUBLE')
                AND state_hash::VARCHAR = 'nan' THEN NULL
            ELSE state_hash
        END AS state_hash,
        CASE
            WHEN typeof(anchor_key) IN ('FLOAT', 'DOUBLE')
                AND anchor_key::VARCHAR = 'nan' THEN NULL
            ELSE anchor_key
        END AS anchor_key,
        CASE
            WHEN typeof(final_state_hash) IN ('FLOAT', 'DOUBLE')
                AND final_state_hash::VARCHAR = 'nan' THEN NULL
            ELSE final_state_hash
        END AS final_state_hash,
        CASE
            WHEN typeof(final_anchor_key) IN ('FLOAT', 'DOUBLE')
                AND final_anchor_key::VARCHAR = 'nan' THEN NULL
            ELSE final_anchor_key
        END AS final_anchor_key
    )
    FROM present
),
-- A hash or key of -0.0 is 0.0: the two are equal, and some queries compare the text. ('0.0'
-- without a cast takes the type of its column.)
without_negative_zero AS (
    SELECT * REPLACE (
        CASE
            WHEN typeof(state_hash) IN ('FLOAT', 'DOUBLE')
                AND state_hash::VARCHAR = '-0.0' THEN '0.0'
            ELSE state_hash
        END AS state_hash,
        CASE
            WHEN typeof(anchor_key) IN ('FLOAT', 'DOUBLE')
                AND anchor_key::VARCHAR = '-0.0' THEN '0.0'
            ELSE anchor_key
        END AS anchor_key,
        CASE
            WHEN typeof(final_state_hash) IN ('FLOAT', 'DOUBLE')
                AND final_state_hash::VARCHAR = '-0.0' THEN '0.0'
            ELSE final_state_hash
        END AS final_state_hash,
        CASE
            WHEN typeof(final_anchor_key) IN ('FLOAT', 'DOUBLE')
                AND final_anchor_key::VARCHAR = '-0.0' THEN '0.0'
            ELSE final_anchor_key
        END AS final_anchor_key
    )
    FROM without_nan
)
SELECT
    group_uid,
    traj_uid,
    CASE WHEN typeof(step_index) SIMILAR TO '(U?(TINY|SMALL|BIG|HUGE)INT|U?INTEGER|"NULL")'
        THEN step_index::BIGINT
        ELSE error('step_index is ' || typeof(step_index)
            || ', and must be an integer; cast it where steps is made')
    END AS step_index,
    reward::DOUBLE AS reward,
    CASE WHEN typeof(is_action_valid) IN ('BOOLEAN', '"NULL"') THEN is_action_valid::BOOLEAN
        ELSE error('is_action_valid is ' || typeof(is_action_valid)
            || ', and must be BOOLEAN; cast it where steps is made')
    END AS is_action_valid,
    state_hash,
    CASE WHEN typeof(version_min) SIMILAR TO '(U?(TINY|SMALL|BIG|HUGE)INT|U?INTEGER|"NULL")'
        THEN version_min::BIGINT
        ELSE error('version_min is ' || typeof(version_min)
            || ', and must be an integer; cast it where steps is made')
    END AS version_min,
    weight::DOUBLE AS weight,
    CASE WHEN typeof(won) IN ('BOOLEAN', '"NULL"') THEN won::BOOLEAN
        ELSE error('won is ' || typeof(won) || ', and must be BOOLEAN; cast it where steps is made')
    END AS won,
    anchor_key::VARCHAR AS anchor_key,
    admissible_actions::VARCHAR[] AS admissible_actions,
    final_state_hash,
    final_anchor_key::VARCHAR AS final_anchor_key,
    final_admissible_actions::VARCHAR[] AS final_admissible_actions,
    value::DOUBLE AS value
FROM without_negative_zero
