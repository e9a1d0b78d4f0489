"""Studies: a question, a prediction written beforehand, runs with seeds, and a page of results.

`gigpo study NAME` runs what is missing of a study and writes `docs/evidence/NAME.md`. A study is
one module with a `STUDY`, listed in NAMES:

    negative_control.py     GiGPO where no state recurs
    sync_equality.py        max_staleness=0 beside the plain loop in minimal_loop.py
    advantage_accuracy.py   each estimator's advantages beside the true ones
    horizon.py              estimators, with the door at three distances
    replication.py          estimators, in FrozenLake and Sokoban
    staleness.py            old episodes, with each correction
    stragglers.py           groups that take too long: left out or waited for
    kill_campaign.py        runs whose parts are killed, beside undisturbed ones
    asynchrony.py           max_staleness=2 beside 0, and where a learner step's time goes
    generalisation.py       what lifts the quick start's success on games it has never seen

`study.py` has the records, `runner.py` runs and resumes, in one process or several,
`results/` keeps a line of JSON for each finished run, `intervals.py` has the bootstrap, `page.py`
and `svg.py` make a page, `index.py` the first one. `small_world.py`, `small_training.py` and
`corridor.py` are a world in which a run takes seconds, and `event_training.py` adds simulated time
to it. `real_runs.py` starts runs as a user does.
"""

NAMES = (
    "negative_control",
    "sync_equality",
    "advantage_accuracy",
    "horizon",
    "replication",
    "staleness",
    "stragglers",
    "kill_campaign",
    "asynchrony",
    "generalisation",
)
