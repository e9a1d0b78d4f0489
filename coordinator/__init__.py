"""The coordinator owns the catalog: it leases groups to workers and claims batches for the learner.

`coordinator.py` is the Ray actor. `admission.py` says how many groups may be in flight,
`task_queue.py` which task is next, `leases.py` who plays which group. `heartbeats.py` keeps when
each process was last heard from; `heartbeat_sender.py` runs in those processes. `client.py` and
`batched_calls.py` are how workers call the coordinator.
"""

from coordinator.admission import free_groups, task_index
from coordinator.batched_calls import BatchedHandle
from coordinator.client import CoordinatorClient, CoordinatorSilent
from coordinator.coordinator import Coordinator, CoordinatorActor
from coordinator.heartbeat_sender import Heartbeat
from coordinator.heartbeats import Component, Status
from coordinator.leases import Lease
from coordinator.logs import capture_output
from coordinator.resume import ResumePoint

__all__ = [
    "Component",
    "Coordinator",
    "CoordinatorActor",
    "CoordinatorClient",
    "CoordinatorSilent",
    "Heartbeat",
    "Lease",
    "ResumePoint",
    "BatchedHandle",
    "Status",
    "capture_output",
    "free_groups",
    "task_index",
]
