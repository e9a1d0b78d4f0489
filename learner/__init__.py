"""The learner trains the policy on claimed groups and publishes numbered weights.

In reading order:

learner.py        the loop: batch, train, publish, settle, checkpoint
restore_report.py  describes what a restart kept and lost
interface.py      its setup, and the errors that end a run
ray_actor.py      the Ray actor that the driver starts
data/             batch_loader: groups to advantages; values: a critic's, of rows and tokens;
                  served_teacher: log-probabilities by a teacher's server; micro_batch: rows to
                  tensors; prefetch: the next batch in a thread
rank_group.py     one call on all ranks
training/         engine: one optimizer update with DeepSpeed; critic: the same of a value network;
                  gradient: of either, over ranks; step_metrics: their figures; alarms: figures
                  beyond their bounds; run_health: errors that end a run
loss_settings.py  the loss, from the settings of the config
model/            policy_model: the network; packed_attention and chunked_logprobs: its parts;
                  vision, lora; tiny_model: a base policy without a download
publishing/       publish: weights as files; broadcast_sender: weights to engines; export: a
                  run's policy for other programs
checkpoint.py     everything a restart needs
distributed/      deepspeed_setup, optimizer_state; private_ray: a Ray for one user
files/            atomic_directory
replay.py         learner steps again, bit for bit; explain.py shows each group's gradient

A group's way: `Prefetch` claims it, `prepare_batch` reads it and computes advantages (of a run with
a critic, from `Critic.values`), `cut_updates` and `micro_batches` make tensors, `RankGroup.train`
and `Engine.train` compute the gradient.
`Learner.run` publishes, then settles; `settle` in store/catalog/batches.py makes the batch's groups
trained.
"""

import lazy_loader

# `__init__.pyi` lists the public names. Each is imported on first use, so that `--help` and errors
# of the command line load neither Arrow nor torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
