"""Keep a run small and whole.

finding.py        the table of everything that fsck can find
fsck.py           check a run, with fsck_catalog.py, fsck_segments.py and fsck_exports.py
segment_rows.py   read one segment file and judge its rows
repair.py         repair what fsck found
group_addresses.py  finds which groups of the run files are of, for rebuild.py
shown_files.py    what readers were shown, which rebuild.py prefers
backup.py         the backup of the catalog, and rebuild.py, which begins with it
database_bytes.py  the bytes of a catalog's file, of any size
rebuild_run_json.py  run.json from its copy
whole_run.py      check, repair, compact or rebuild one whole run, as the commands do
compact.py        merge many small segment files
sweep.py          retire old files, and remove files that nobody needs
maintainer.py     the thread that merges, retires and removes while a run is written
"""
