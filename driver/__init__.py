"""Starts, watches, restarts and stops the processes of a run.

`train_run.py` and `evaluate_run.py` are the two things that a driver does. `run_control.py` is for
everybody else: the status of a run, how to stop it, and its number of workers.
"""

import lazy_loader

# The public names stand in `__init__.pyi`. Each is imported when it is first used: `gigpo status`
# needs no torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
