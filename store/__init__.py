"""Store a run's trajectories: queue between actors and learner, dataset, lineage and resume point.

A segment is an immutable Parquet file of whole trajectories. The catalog, an SQLite file with one
owner, is the truth about which segments, groups, batches and versions count. Everything else that
readers use is exported from it. Nothing here knows machine learning. In reading order:

records.py           Step and Trajectory: the rows that are stored, and their Arrow schema
run_names.py         the names of the files of a run
layout.py            where each file of a run is, and make or open a run
run_json.py          run.json, and the format of a run's files
segments.py          write and read one segment
segment_encoding.py  its rows as Parquet bytes
weight_files.py      the files of a model's weights, and the head of one
adapter_files.py     a published LoRA adapter, and its base model's digest
catalog/             what counts: groups, batches, versions, segments
reading/             the manifest, the SQL views, and a reader that can do no harm
maintenance/         compaction, retention, fsck, repair, rebuild
exchange/            datasets, offline groups, and forks: trajectories from run to run; and a run
                     that goes on from its storage when its disk is lost (bring.py)
untrusted/           files and settings that a stranger may have written
user_cache.py        this user's cache, which nobody else may enter
storage.py           the files of a run in a local directory or an object store
remote_directory.py  weights and checkpoints in an object store
opened_version.py    a published version, opened once to be copied
primary_directory.py the one directory that goes on with a run whose files are elsewhere
shown_lsn.py         how far readers have been shown a run: an older copy is refused
storage_claim.py     of two runs that are made in one storage at once, one has it
atomic_write.py      files that are either absent or whole after a crash
file_rights.py       who may read and write a copy, and what is private
hashing.py           state hashes, uids and digests
broadcast.py         the protocol by which weights are sent past the store
errors.py            the errors of the store
clock.py             the time, as UTC epoch microseconds, and how long replaced files stay

A group's way: catalog/groups.py opens, leases and commits it, with the file that `write_segment`
wrote; catalog/batches.py claims and settles it. `read_segments` gives its rows to the learner.
"""

import lazy_loader

# The public names stand in `__init__.pyi`. Each is imported when it is first used: `--help` and
# errors of the command line need neither Arrow nor torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
