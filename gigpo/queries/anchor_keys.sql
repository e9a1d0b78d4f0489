-- Which steps count as taken in the same state, eq. 6, by the parameter `anchor`. Always within one group.
--   state              the stored state_hash (the authors: the raw observation)
--   state_and_actions  the same, and the same set of admissible actions (G2PO, arXiv 2606.22995): neither their order nor
--                      repeats count; needs the column admissible_actions, a list of texts, none of them NULL
--   suffix             the same last `anchor_history` states of the trajectory, this one included, see suffixes.sql
--   anchor_key         whatever the column anchor_key says, e.g. SQL over anchor_text; NULL = no state
--   (similar and similar_greedy come here as anchor_key, with keys that similarity_keys made; see checked.sql)
-- The key is (group_uid, state_key, refinement): compared as it is, never hashed again. A step whose state (or one in its
-- suffix) is unknown has no key, refinement NULL: it is its own singleton, not one of a crowd of unknowns. hgpo has one line
-- for each suffix of a step; all others have one line per step.
--
-- Policy versions, by the parameter `anchor_versions`. Members of one anchor group may come from different policies:
--   mixed     all together. Most members, so the least variance; the baseline is the value of a mixture of old and new
--             policies, so it is biased for the newest by how far they differ.
--   window    only steps at most `version_window` versions apart: bucket b, a part of the key, holds the versions from
--             b (w + 1) to b (w + 1) + w below the newest of the whole group, so buckets are a partition. Bias shrinks with
--             w and is 0 at w = 0; groups get smaller, so variance and singletons grow.
--   weighted  all together, each with its column `weight`, see weighted_anchor_groups.sql.
-- in:  scores, suffixes; estimator, anchor, anchor_versions, version_window
-- out: scores' columns but earlier_states, state_key, refinement VARCHAR
SELECT
    * EXCLUDE (earlier_states, bucket),
    CASE WHEN anchor <> 'anchor_key' THEN state_hash END AS state_key,
    bucket || CASE
        WHEN anchor = 'anchor_key' THEN CASE
            WHEN BOOL_AND(anchor_key IS NULL) OVER ()
                THEN error('anchor anchor_key needs a column anchor_key; this table has none, or only NULL in it')
            ELSE 'key ' || anchor_key
        END
        WHEN state_hash IS NULL THEN NULL
        WHEN anchor = 'state_and_actions' AND (list_count(admissible_actions) = len(admissible_actions)) IS NOT TRUE
            THEN error('anchor state_and_actions needs a list admissible_actions without NULL for every step; '
                || 'some have none, or a NULL in it')
        WHEN anchor = 'state_and_actions'
            THEN array_to_string(
                list_transform(list_sort(list_distinct(admissible_actions)), lambda a: len(a) || ':' || a), '')
        ELSE earlier_states
    END AS refinement
FROM (
    SELECT
        *,
        CASE
            WHEN anchor_versions <> 'window' THEN ''
            WHEN version_min IS NULL
                THEN error('anchor_versions window needs a version_min for every step, and some have none')
            WHEN version_min NOT BETWEEN -4611686018427387903 AND 4611686018427387903
                THEN error(format('version_min is {}, and must be between -2^62 and 2^62', version_min))
            ELSE format('{} ', (MAX(version_min) OVER (PARTITION BY group_uid) - version_min) // (version_window::BIGINT + 1))
        END AS bucket
    FROM (
        FROM scores WHERE estimator IS DISTINCT FROM 'hgpo' AND anchor IS DISTINCT FROM 'suffix'
        UNION ALL BY NAME
        FROM suffixes WHERE estimator = 'hgpo' OR anchor = 'suffix'
    )
)
