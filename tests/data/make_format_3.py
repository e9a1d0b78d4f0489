"""Makes the run in format-3.tar.gz. To be run with the code of commit a900b9d, the last that wrote format 3:

mkdir /tmp/old && git archive a900b9d store tests | tar x -C /tmp/old
cd /tmp/old && PYTHONPATH=. python <here>/make_format_2.py /tmp/format-3
tar --sort=name --owner=0 --group=0 -czf <here>/format-3.tar.gz -C /tmp format-3
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.store_runs import make_run

if __name__ == "__main__":
    make_run(Path(sys.argv[1]))
