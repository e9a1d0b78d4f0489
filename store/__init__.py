"""The trajectory store: queue, dataset, lineage and resume point of a run. Knows no machine
learning.

`records.py` (Step, Trajectory, the Arrow schema) and `hashing.py` say what is stored, `layout.py`
where, `segments.py` how (immutable Parquet). `catalog/` is the truth about what counts, `reading/`
shows it to outside readers as SQL, `upkeep/` keeps it small and whole (compaction, retention, fsck,
rebuild), `cli/` is `gigpo`, `exchange.py` and `stored.py` take trajectories from run to
run, `errors.py` says what can go wrong. `broadcast.py` is how weights are sent past the store.
"""

import lazy_loader

# The public names stand in `__init__.pyi`. Each is imported when it is first used: `--help` and
# errors of the command line need neither Arrow nor torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
