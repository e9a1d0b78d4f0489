"""The catalog: one SQLite file with one owner, which says what exists and what happened to it.

`catalog.py` is its public face, one transaction a call; `groups.py`, `batches.py`, `ledger.py` hold
the transactions by subject, `database.py` the connection, lock and fencing, `schema.sql` the
tables.
"""
