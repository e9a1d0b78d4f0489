"""The driver: the process that a person starts. It starts, watches, restarts and stops the others.

Four loops run at the same time, each in processes of its own:

worker       consumes leases, produces committed trajectories; waits for admission (the learner
             unblocks it by settling a batch, once its weights are announced), and for new
             weights to be written (a thread of the learner unblocks it)
learner      consumes batches of complete groups, produces numbered weights; waits for groups (the
             workers unblock it by committing)
coordinator  consumes calls, produces leases and batches; never waits
supervisor   consumes heartbeats and ended calls, produces restarts and notices; waits for any call
             to end, half a second at most

`train_run.py` and `evaluate_run.py` do what `gigpo train` and `gigpo evaluate` ask
`supervisor.py` is the loop of the driver itself
`process_set.py` owns the processes that exist, and their planned starts
`worker_scaling.py` has workers join and leave a run that goes on
`processes.py` starts and kills one process; `CoordinatorProcess` is the coordinator's
`health.py` decides when a process is lost, and how often it is started again
`shutdown.py` stops all processes in order, `interrupt.py` handles Ctrl-C and SIGTERM
`errors.py` has the errors that end a run, and finds the cause in another process's error
`cluster.py` starts or joins the Ray cluster, `nodes.py` reads which of its nodes leave
`preflight.py` checks the run directory, GPUs and disk before a start
`environment_check.py` lists the tasks and starts the environment once
`model_download.py` finds or downloads the model, with `hub_process.py`
`offline_sources.py` checks and imports `source=RUN[@where]`
`config_file.py` loads the config that a command names, unless it is a stranger's
`resume.py` has the settings of a run that goes on, `fork.py` those of a fork, and makes it
`run_lock.py` keeps a run to one driver, `run_control.py` steers it from another process
`progress.py` shows a run on the screen, `screen.py` says how much of it, or in lines of JSON
`tensorboard_writer.py` shows it in TensorBoard, `trackers/` in Weights & Biases, trackio and MLflow
`prometheus.py` serves its figures, `webhook.py` posts its alarms

coordinator/__init__.py, actors/__init__.py and learner/__init__.py tell the way of a group and of a
version of the weights through the processes.
"""

import lazy_loader

# The public names stand in `__init__.pyi`. Each is imported when it is first used: `gigpo status`
# needs no torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
