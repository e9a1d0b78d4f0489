"""What the fork server of engines imports (`engine_server.py`): all that an engine needs, none of
which starts a thread.
"""

import ctypes
import gc
import importlib
import signal
import traceback

from actors.inference.fork_server import PR_SET_PDEATHSIG

MODULES = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "actors.inference.vllm_weight_loader",
)

# With the worker, also if that is killed. An engine is a child of this process and ends with it in
# turn (weight_transfer.py).
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
gc.disable()  # a fifth of the time
try:
    for module in MODULES:
        importlib.import_module(module)
except ImportError:
    # a fork server says nothing of it: an engine then imports it itself, and fails with the reason
    traceback.print_exc()
finally:
    gc.freeze()  # what all engines share is not copied by a look through it
    gc.enable()
