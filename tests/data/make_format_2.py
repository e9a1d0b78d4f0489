"""Makes the run in format-2.tar.gz. To be run with the code of commit 9e8b7eb, the last that wrote format 2:

mkdir /tmp/old && git archive 9e8b7eb store tests | tar x -C /tmp/old
cd /tmp/old && PYTHONPATH=. python <here>/make_format_2.py /tmp/format-2
tar --sort=name --owner=0 --group=0 -czf <here>/format-2.tar.gz -C /tmp format-2
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.store_runs import make_run

if __name__ == "__main__":
    make_run(Path(sys.argv[1]))
