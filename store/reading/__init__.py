"""Show a run to outside readers.

manifest.py         the manifest: the segments and exported tables of one snapshot
pins.py             keep the files of a snapshot while somebody reads it
open_sql.py         the text of open.sql, made of sources.sql and views.sql
query.py            execute open.sql on a DuckDB connection
reader.py           Reader: SQL in a child process that can do no harm
sandbox.py          that process; landlock.py and read_only_files.py protect the machine from it
arrow_answer.py     what a query gives, as Arrow batches within bounds
wire.py             the messages between the reader and its process
mirror.py           local copies of a run in a remote storage
lineage.py          what a learner step was trained on, from the catalog
"""
