"""The `gigpo` program. A command reads its arguments, calls a lower package, and prints.

`__main__.py`     the program: its list of commands, and how every error is shown
`train.py`        train
`evaluate.py`     evaluate
`run_control.py`  status, stop, workers
`view.py`         view
`report.py`       report
`audit.py`        audit
`sql.py`          sql; `table_output.py` writes its result as a table, CSV, JSON or Parquet
`store.py`        fsck, rebuild, compact, export, import, fetch
`bias.py`         bias
`study.py`        study
`models.py`       export-model, replay
`arguments.py`    arguments that several commands have
`output_file.py`  writes the --output of a command

Libraries are imported inside the commands, so that `--help` and mistakes are answered at once.
"""

import os
import sys

# An editable install of a package without __init__.py leaves a relative name there. The current
# directory, which may be a stranger's run, would be searched for a directory of that name.
sys.path[:] = [path for path in sys.path if not path or os.path.isabs(path)]
