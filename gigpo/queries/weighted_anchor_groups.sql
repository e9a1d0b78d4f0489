-- Anchor groups with importance weights, an off-policy baseline: a member counts more if the
-- current policy is likelier to take its action. Our form of eq. 7's statistics; we know of no
-- paper. weight = min(rho, C), rho = pi / mu of the step's own response, C a cap (2 in the
-- token-level correction); the caller computes it.
-- With v = weight / (largest in the group):
--   mean = sum(v x) / V,   var = sum(v (x - mean)^2) / (V - sum(v^2) / V),   V = sum(v)
-- This is the unbiased variance for given weights. For equal weights v is exactly 1 and
-- V - sum(v^2) / V is n - 1, so they give the statistics of 'mixed'. With ddof 0 the divisor is V.
-- The first divisor is computed as sum(v (V - v)) / V, and V - v of the heaviest member as the sum
-- of all others: if one weight exceeds them by 1e16, V equals it, and the difference would be
-- rounding only.
-- The mean estimates the value of one response by pi in this state, followed by responses of mu.
-- rho says nothing of those later responses. The product of their ratios would, but explodes with
-- the length. So even uncapped it is not pi's own value. As an estimate of the former, the uncapped
-- mean is consistent (self-normalised: bias O(1/n)); the cap trades bias for less variance, which
-- goes by the effective number of members, V^2 / sum(v^2).
-- The episode term stays unweighted, for the same reason.
-- in:  comparisons
-- out: the columns of anchor_groups
WITH weighted AS (
    SELECT
        group_uid,
        state_key,
        refinement,
        step_return,
        raw_return,
        MAX(weight) OVER (PARTITION BY group_uid, state_key, refinement) AS max_weight,
        weight / max_weight AS v
    FROM comparisons
    WHERE
        refinement IS NOT NULL
        -- Within these bounds neither a ratio of two weights nor the sum of many is 0 or infinite.
        AND CASE WHEN weight BETWEEN 1e-100 AND 1e100 THEN true ELSE error(format(
            'anchor_versions weighted needs a weight from 1e-100 to 1e100 for every step; '
            || 'trajectory {} step {} has {}',
            traj_uid::VARCHAR, step_index, COALESCE(weight::VARCHAR, 'NULL'))) END
),
means AS (
    SELECT
        group_uid,
        state_key,
        refinement,
        max_weight,
        COUNT(*) AS anchor_size,
        SUM(v) AS total_weight,
        SUM(v * step_return) / total_weight AS mean,
        -- all members but one of the heaviest
        COALESCE(SUM(v) FILTER (v < 1), 0) + (COUNT(*) FILTER (v = 1) - 1) AS other_weight,
        MIN(step_return) = MAX(step_return) AS all_equal,
        MAX(raw_return) - MIN(raw_return) AS spread
    FROM weighted
    GROUP BY group_uid, state_key, refinement, max_weight
)
SELECT
    means.group_uid,
    means.state_key,
    means.refinement,
    anchor_size,
    means.max_weight,
    mean,
    SQRT(SUM(v * (step_return - mean) ** 2)
        / NULLIF(
            SUM(v * CASE WHEN v < 1 THEN total_weight - v ELSE other_weight END) / total_weight, 0
        )) AS deviation,
    SQRT(SUM(v * (step_return - mean) ** 2) / total_weight) AS deviation_0,
    all_equal,
    spread
FROM weighted
JOIN means
    ON weighted.group_uid = means.group_uid
    AND weighted.state_key IS NOT DISTINCT FROM means.state_key
    AND weighted.refinement = means.refinement
GROUP BY
    means.group_uid, means.state_key, means.refinement, anchor_size, total_weight, other_weight,
    means.max_weight, mean, all_equal, spread
