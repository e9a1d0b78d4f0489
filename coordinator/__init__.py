"""Own the catalog of a run in one Ray actor, the coordinator, and call it through one client.

`coordinator.py` is the actor; its docstring says what it consumes, produces and waits for
`client.py` is how workers, the learner and the driver call it
`admission.py` says how `max_staleness` paces workers, and when evaluation rounds are due; the bound
               on staleness is `drop_stale` (store/catalog/batches.py)
`task_queue.py` holds the tasks, and opens the next group or the groups of a round
`environment_order.py` assigns environments to training groups
`task_order.py` draws tasks by the weights of `tasks.order`
`leases.py` keeps which worker plays which group
`suspects.py` finds the tasks that kill workers, which are played alone and then abandoned
`weight_update_lock.py` lets few workers at a time load the files of new weights
`heartbeats.py` sends and keeps heartbeats
`export_schedule.py` exports for outside readers, and starts the maintainer thread
`logs.py` sends the output of a process to its log

A group's way passes here four times: `Coordinator.lease` gives it to a worker, `commit` enters its
trajectories, `claim` gives it to the learner, and `settle` makes it trained. Each is a transaction
of store/catalog/groups.py or store/catalog/batches.py.

A version's way passes here twice: `announce` makes it the newest one, which leases name from then
on, and `written` says that its files are whole.
"""

from coordinator.client import CoordinatorClient, CoordinatorSilent, Reply
from coordinator.coordinator import Coordinator, CoordinatorActor, ResumePoint, Settlement, Status
from coordinator.heartbeats import Component, Heartbeat, heartbeat_every_s
from coordinator.leases import Lease
from coordinator.logs import capture_output
from coordinator.task_order import check_order

__all__ = [
    "Component",
    "Coordinator",
    "CoordinatorActor",
    "CoordinatorClient",
    "CoordinatorSilent",
    "Heartbeat",
    "Lease",
    "Reply",
    "ResumePoint",
    "Settlement",
    "Status",
    "capture_output",
    "check_order",
    "heartbeat_every_s",
]
