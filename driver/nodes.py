"""Read from Ray which nodes of a joined cluster are about to leave it.

Ray marks a node as draining when its `ray start --block` gets a SIGTERM, by `ray drain-node`, and
when an autoscaler takes the node back. It starts nothing there any more, but tells no actor.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import ray
import ray._private.state

from driver.cluster import is_joined

LONGEST_GRACE_S = 20.0  # of episodes in play; also where Ray names no deadline
# End of the notice in which a worker commits, hands back its leases and closes its engine.
RESERVED_S = 10.0


def draining_nodes() -> Mapping[str, float]:
    """Return, by node id, how many seconds episodes may go on there."""
    if not is_joined():
        return {}
    deadlines_ms = ray._private.state.state.get_draining_nodes()
    return {node: grace_s(deadline_ms / 1e3) for node, deadline_ms in deadlines_ms.items()}


def grace_s(deadline_s: float) -> float:
    """Return how long episodes may go on before `deadline_s`, a UNIX time; 0 is no deadline."""
    if not deadline_s:
        return LONGEST_GRACE_S
    return min(max(0.0, deadline_s - time.time() - RESERVED_S), LONGEST_GRACE_S)


def node_of(handle: Any) -> str:
    """Return the id of the node that an actor is on; "" if Ray has found no place for it yet."""
    # the public call needs Ray's dashboard
    state = ray._private.state.actors(handle._actor_id.hex())
    return str(state["Address"]["NodeID"]) if state.get("Pid") else ""
