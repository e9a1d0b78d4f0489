"""Keep a run's catalog: one SQLite file with one owner, the truth about what counts.

catalog.py          the class Catalog: every transaction of the owner, as a method
records.py          the types that the catalog takes and returns: Group, Batch, ...
database.py         the owner: transactions, fencing by epochs, syncs
transaction.py      what one transaction executes, and its lsn
connection.py       SQLite's connections: the owner's, and those that only read
catalog_files.py    the files that SQLite would open, looked at before
private_copy.py     a copy of a catalog that another user could exchange
ownership.py        the lock, and which runs this user may own or read
schema.sql          the tables; schema_check.py refuses a catalog with other ones
log_check.py        commits in the log that SQLite does not read after a changed byte
groups.py           a group from open to complete: open, lease, commit; groups by state
imported_groups.py  groups of other runs: read only, or trained on as offline groups
batches.py          a group from complete to consumed: drop stale, claim, settle, roll back
task_results.py     results of tasks, by which later groups choose theirs
segment_states.py   a segment after its commit: replaced, expired, removed
run_records.py      versions, checkpoints, metrics, heartbeats, unfinished episodes
snapshot.py         the exported tables, now or as of an earlier lsn
missing_members.py  groups that come back without members, because their file is gone
repairs.py          damaged files and wrong sums, for fsck
adopt.py            files and groups that a backup does not know, for rebuild
"""
