"""Import all that an engine needs, in the fork server. None of it starts a thread."""

import ctypes
import gc
import importlib
import signal
import traceback

from actors.inference.engine_process import PR_SET_PDEATHSIG

MODULES = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "actors.inference.engine_worker",
)

# The server ends when the worker does, also if that is killed. An engine is a child of the server
# and ends with it (`die_with_parent` in engine_worker.py).
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
gc.disable()  # saves a fifth of the time
try:
    for module in MODULES:
        importlib.import_module(module)
except ImportError:
    # Python ignores it here. The engine imports the module again and fails with the reason.
    traceback.print_exc()
finally:
    gc.freeze()  # a collection in an engine would copy the memory that all engines share
    gc.enable()
