"""Write `docs/evidence/index.md`: the two questions, the defaults, and what each study found."""

from __future__ import annotations

from benchmarks.studies import NAMES
from benchmarks.studies.page import (
    EVIDENCE,
    QUOTED,
    Summary,
    filled,
    reading_of,
    table_line,
    values_of,
)
from benchmarks.studies.runner import read
from benchmarks.studies.study import load

# A figure names its study as well: {horizon: gigpo/8 - grpo/8[mean]}.
ANSWERS = """\
**Does GiGPO win here?** In corridors with recurring states it learns faster than its episode term
alone, and by more where success is further away: its mean success over the run is higher by
{horizon: gigpo/2 - grpo/2[mean]} with the door 2 rooms away, {horizon: gigpo/5 - grpo/5[mean]} with
5 and {horizon: gigpo/8 - grpo/8[mean]} with 8, of which only the growth from 2 is shown
([horizon](horizon.md)). It is not the best estimator there, as GiGPO less G2PO is
{horizon: gigpo/8 - g2po/8[mean]} with 8 rooms, and where no state recurs it is GRPO, bit for bit
([negative_control](negative_control.md)).

**Does asynchrony cost anything?** With the default correction, training on episodes that are one
version old costs nothing that three seeds show in one corridor,
{staleness: token_tis/1 - token_tis/0[mean]} of mean success, though
{stragglers: wait/1 - synchronous[mean]} in four, and older ones slow learning at 2 versions,
{staleness: token_tis/2 - token_tis/0[mean]}, and probably at 4,
{staleness: token_tis/4 - token_tis/0[mean]} ([staleness](staleness.md)). With
`max_staleness=2` a learner step of the quick start takes
{asynchrony: asynchronous / synchronous[step_s]} of a synchronous one's time on two cores, but it is
not shown that half of the training episodes are won sooner,
{asynchrony: asynchronous - synchronous[reached_s]} s ([asynchrony](asynchrony.md)). Leaving out
groups that take too long selects against slow tasks, as {stragglers: drop/1[slow_share]} of the
groups trained on are of the slowest of four at one version and {stragglers: wait/1[slow_share]}
with waiting, but in a world where quicker tasks teach the same its mean success on that task less
that with waiting is {stragglers: drop/1 - wait/1[slow]}, and a learner step takes
{stragglers: drop/1 / wait/1[step_s]} of the simulated time ([stragglers](stragglers.md)).

![Success over learner steps, by estimator and distance](horizon.svg)

![Success over learner steps, by correction and staleness](staleness.svg)

All runs are small. They show what these algorithms do in worlds where a run takes seconds, and not
what they do with a large model. The interval of three seeds (staleness, asynchrony) is little more
than the range of the three, and covers less than 95%; that of five is somewhat too narrow. Each
page has the question, the prediction that was written before the first run, the settings, a table
with intervals, a picture, a reading and the cost.
`gigpo study NAME` repeats it. This page is made by `gigpo study NAME --page`.

**Not run:** of the paper's comparison all but seven runs of FrozenLake and Sokoban, which were
stopped because so small a policy does not tell the states of a grid apart
([replication](replication.md)). TextWorld
has three seeds with and without the step term ([generalisation](generalisation.md)): held-out
success without it less with it is {generalisation: no anchors - 120 games[heldout]}. 200 ALFWorld
games with three seeds of two arms would take about four hours of two cores: 7 minutes of cloning
and 120 learner steps of 17 s each, measured once ([alfworld](../alfworld.md)). For SmolLM2-135M no
learner step of a useful size was measured."""
DEFAULTS = (
    (
        "`algorithm.estimator`",
        "`gigpo`",
        """[horizon](horizon.md): ahead of the estimators of whole episodes; less G2PO it is
        {horizon: gigpo/5 - g2po/5[mean]} at 5 rooms. It stays: this is one world, in which both win
        always at the end. `algorithm.estimator=g2po` is worth a try where states recur.""",
    ),
    (
        "`algorithm.omega`",
        "1",
        """[horizon](horizon.md): less 0 it is {horizon: gigpo/5 - grpo/5[mean]} at 5 rooms. Other
        values were not run.""",
    ),
    (
        "`max_staleness`",
        "1",
        """[staleness](staleness.md): less 0 it is {staleness: none/1 - none/0[mean]} at equal
        samples, and {staleness: none/1 - none/0[equal_time]} at equal time if playing takes as long
        as training. [stragglers](stragglers.md): with `wait`, 1 less 0 is
        {stragglers: wait/1 - synchronous[mean]} at equal samples and
        {stragglers: wait/1 - synchronous[equal_clock]} at equal time.""",
    ),
    (
        "`max_staleness` of the quick start",
        "2",
        """[asynchrony](asynchrony.md): held-out success less that of 0 is
        {asynchrony: asynchronous - synchronous[heldout]}: no loss is shown, and three seeds do not
        exclude a small one. 1 was not run.""",
    ),
    (
        "`loss.corrections`",
        "`token_tis` with `ppo_clip`",
        """[staleness](staleness.md): less none it is {staleness: token_tis/1 - none/1[mean]} at 1
        and {staleness: token_tis/2 - none/2[mean]} at 2, so age is no reason for it. It stays for
        what the small world lacks, an engine whose probabilities differ from the learner's; no
        study shows that gain.""",
    ),
    (
        "`loss.policy`",
        "`ppo_clip`",
        """[staleness](staleness.md): `dppo_tv` less it is {staleness: dppo_tv/1 - none/1[mean]} at
        1. The others were not run.""",
    ),
    (
        "`stragglers`",
        "`drop`",
        """[stragglers](stragglers.md): less `wait` it is {stragglers: drop/1 - wait/1[mean]} of
        mean success at equal samples and {stragglers: drop/1 - wait/1[equal_clock]} at equal time,
        with `max_staleness=1`, where what is learned in quick tasks is right in slow ones. Where it
        is not, no study says what it costs, and `wait` trains on all tasks evenly.""",
    ),
    (
        "`env.options.train_games` of the quick start",
        "480",
        """[generalisation](generalisation.md): held-out success is
        {generalisation: 480 games[heldout]}, with 120 games {generalisation: 120 games[heldout]}.
        """,
    ),
)


def write_index() -> None:
    """Write `docs/evidence/index.md`: what each study found so far."""
    EVIDENCE.mkdir(parents=True, exist_ok=True)
    (EVIDENCE / "index.md").write_text(index_text(), encoding="utf-8")


def index_text() -> str:
    studies = {name: load(name) for name in NAMES}
    rows_of = {name: read(study) for name, study in studies.items()}
    summaries = {name: Summary(study, values_of(rows_of[name])) for name, study in studies.items()}

    def quoted(text: str) -> str:
        return QUOTED.sub(
            lambda found: summaries[found["study"]][found["arms"]][found["measure"]], text
        )

    table = [table_line("setting", "default", "evidence"), table_line("---", "---", "---")]
    for setting, default, evidence in DEFAULTS:
        table.append(table_line(setting, default, " ".join(quoted(evidence).split())))
    parts = [
        "# What the studies found",
        filled(quoted(ANSWERS)),
        "## Do the studies support the defaults?",
        "\n".join(table),
    ]
    for name, study in studies.items():
        rows = rows_of[name]
        n_wanted = len(study.arms) * study.seeds
        parts += [
            f"## [{study.title}]({study.name}.md)",
            f"**Question.** {filled(study.question)}",
            reading_of(study, values_of(rows)) if rows else "No run is finished yet.",
            f"{len(rows)} of {n_wanted} runs.",
        ]
    return "\n\n".join(parts) + "\n"
