"""Studies: a question, a prediction written beforehand, runs with seeds, and a page of results.

`gigpo study NAME` runs what is missing of a study and writes `docs/evidence/NAME.md`. A study is
one module with a `STUDY`, listed in NAMES:

    negative_control.py     GiGPO where no state recurs
    horizon.py              estimators, with the door at three distances

`study.py` has the records, `runner.py` runs and resumes, `worker.py` is one of several processes,
`results/` keeps a line of JSON for each finished run, `intervals.py` has the bootstrap, `page.py`
and `svg.py` make the page. `small_world.py`, `small_training.py` and `corridor.py` are a world in
which a run takes seconds.
"""

NAMES = ("negative_control", "horizon")
