-- Anchor key of every step, eq. 6: steps of one group with the same key share a state. The
-- parameter `anchor` chooses it:
--   state              the recorded state_hash (the authors: the raw observation)
--   state_and_actions  also the same set of admissible actions (G2PO, arXiv 2606.22995); order and
--                      repeats do not count. It needs the column admissible_actions, a list of
--                      texts without NULL
--   suffix             the same last `anchor_history` states of the trajectory, see suffixes.sql
--   anchor_key         the column anchor_key, for example SQL over anchor_text; NULL = no state
--   (similar and similar_greedy arrive as anchor_key, with keys of similarity_keys; checked.sql)
-- The key is (group_uid, state_key, refinement), compared as it is and never hashed again. A step
-- with an unknown state, or one in its suffix, has no key (refinement NULL) and is alone, and so is
-- a final observation without a list of actions, for state_and_actions. hgpo has one line for each
-- suffix of a step, the other estimators one line per step.
--
-- Members of one anchor group may come from different policies. The parameter `anchor_versions`:
--   mixed     all together. Most members, so the least variance. The baseline is the value of a
--             mixture of old and new policies, so it is biased for the newest by their difference.
--   window    only steps at most `version_window` = w versions apart. Bucket b, a part of the key,
--             has the versions from b (w + 1) to b (w + 1) + w below the newest of the group, so
--             buckets are a partition. Bias shrinks with w and is 0 at w = 0; groups get smaller,
--             so variance and singletons grow.
--   weighted  all together, each with its column `weight`, see weighted_anchor_groups.sql.
-- in:  scores, suffixes; estimator, anchor, anchor_versions, version_window
-- out: scores' columns but earlier_states, state_key,
--      context VARCHAR (refines state_key, whatever the versions; NULL: no key),
--      refinement VARCHAR (the context with the bucket of versions)
WITH compared AS (
    FROM scores WHERE estimator IS DISTINCT FROM 'hgpo' AND anchor IS DISTINCT FROM 'suffix'
    UNION ALL BY NAME
    FROM suffixes WHERE estimator = 'hgpo' OR anchor = 'suffix'
),
accepted AS (
    FROM compared
    WHERE CASE
        WHEN anchor = 'state_and_actions'
            AND state_hash IS NOT NULL
            AND NOT (is_final AND admissible_actions IS NULL)
            AND (list_count(admissible_actions) = len(admissible_actions)) IS NOT TRUE
            THEN error('anchor state_and_actions needs a list admissible_actions without NULL '
                || 'for every step; some have none, or a NULL in it')
        WHEN anchor_versions = 'window' AND version_min IS NULL
            THEN error('anchor_versions window needs a version_min for every step, '
                || 'and some have none')
        WHEN anchor_versions = 'window'
            AND version_min NOT BETWEEN -4611686018427387903 AND 4611686018427387903
            THEN error(format(
                'version_min is {}, and must be between -2^62 and 2^62', version_min))
        ELSE true
    END
    QUALIFY CASE
        WHEN anchor = 'anchor_key' AND BOOL_AND(anchor_key IS NULL) OVER ()
            THEN error('anchor anchor_key needs a column anchor_key; this table has none, '
                || 'or only NULL in it')
        ELSE true
    END
),
contexts AS (
    SELECT
        * EXCLUDE (earlier_states),
        CASE WHEN anchor <> 'anchor_key' THEN state_hash END AS state_key,
        CASE
            WHEN anchor = 'anchor_key' THEN 'key ' || anchor_key
            WHEN state_hash IS NULL THEN NULL
            WHEN anchor = 'state_and_actions' THEN array_to_string(
                list_transform(
                    list_sort(list_distinct(admissible_actions)), lambda a: len(a) || ':' || a
                ), '')
            ELSE earlier_states
        END AS context
    FROM accepted
),
buckets AS (
    SELECT
        *,
        CASE anchor_versions
            WHEN 'window' THEN format('{} ',
                (MAX(version_min) OVER (PARTITION BY group_uid) - version_min)
                // (version_window::BIGINT + 1))
            ELSE ''
        END AS bucket
    FROM contexts
)
SELECT * EXCLUDE (bucket), bucket || context AS refinement
FROM buckets
