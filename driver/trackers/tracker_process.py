"""Run one tracker in a process of its own: `python -m driver.trackers.tracker_process NAME`.

The first line on its standard input is the setup, each other has a learner step and its values. The
end of the input ends it. Its standard output says in lines of JSON that it is ready, and what
failed; a failure ends it. What the tracker itself prints goes to standard error. It is a process,
because trackers print, set environment variables, hang without a network, and may crash.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from driver.trackers.services import TRACKERS, TrackerSetup
from printable import REASON_CHARACTERS, one_line
from url_secrets import without_secrets

READY = "ready"


def main(name: str) -> None:
    """Log until the input ends, or until the tracker fails."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the tracker's own lines
    try:
        given: dict[str, Any] = json.loads(sys.stdin.readline())
        tracker = TRACKERS[name](TrackerSetup(**given))
        answers.write(json.dumps({READY: True}) + "\n")
        for line in sys.stdin:
            learner_step, values = json.loads(line)
            tracker.log(learner_step, values)
        tracker.close()
    except Exception as error:  # the border to another's code: passed on
        # A server's words may have any length, and the driver reads this between its looks.
        fault = f"{type(error).__name__}: {without_secrets(one_line(error))[:REASON_CHARACTERS]}"
        answers.write(json.dumps({"fault": fault}) + "\n")
        raise SystemExit(1) from error


if __name__ == "__main__":
    main(sys.argv[1])
