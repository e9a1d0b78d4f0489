"""The learner trains the policy on claimed groups and publishes numbered weights.

In reading order:

interface.py           defines the learner's setup, and the errors that end a run
ray_actor.py           runs the learner as the Ray actor that the driver starts
learner.py             runs the loop: batch, train, publish, settle, checkpoint
step_times.py          measures where a learner step's seconds go
data/
  prefetch.py          prepares the next batch in a thread
  batch_loader.py      makes a claimed batch ready: reads, refills, scores, selects, packs
  training_rows.py     computes the advantages of rows, and selects those to train on
  values.py            computes a critic's values, of rows and of response tokens
  served_teacher.py    asks a teacher behind a server for log-probabilities
  batch_summary.py     summarises all rows that a learner step claimed
  updates.py           cuts rows into optimizer updates
  micro_batch.py       makes tensors of rows
  sequences.py         merges rows into token sequences
  packing.py           chooses the sequences of each micro-batch
  arrow_lists.py       reads list columns as flat arrays
rank_group.py          calls a method on all ranks
training/
  engine.py            applies optimizer updates to the policy, with DeepSpeed
  critic.py            applies optimizer updates to the critic
  gradient.py          adds up gradients over micro-batches and ranks
  step_metrics.py      computes the figures of an update
  alarms.py            finds figures beyond their bounds
  run_health.py        raises the errors that end a run
loss_settings.py       makes the loss from the config
model/
  policy_model.py      computes log-probabilities and entropies of response tokens
  packed_attention.py  runs several sequences end to end without padding
  chunked_logprobs.py  computes log-probabilities without keeping all logits
  vision.py            gives images to the model
  lora.py              adds adapters, yields those of a version, and merges them
  tiny_model.py        makes a base policy without a download
publishing/
  publish.py           holds a copy of the weights, and writes them as files
  copy_model.py        copies a model directory that the user chose
  broadcast_sender.py  sends weights to engines
  exportable.py        finds what a run has to export
  base_model.py        finds and loads the base model of a run
  export_version.py    writes a published version for other programs
  export_checkpoint.py writes a checkpoint for other programs
checkpoint.py          copies, writes and loads everything that a restart needs
restore.py             loads a restart's checkpoint, describes what it kept and lost
distributed/
  deepspeed_setup.py   starts DeepSpeed and joins the ranks
  partitioned_load.py  loads a model for ZeRO 3 part by part
  sequence_group.py    shares the tokens of a micro-batch among several ranks
  optimizer_state.py   reads and writes the optimizer's state at any ZeRO stage
  private_ray.py       starts a Ray for one user
files/
  atomic_directory.py  makes a directory visible when it is whole
  write_behind.py      writes in a thread, behind the next learner step
replay.py              trains recorded learner steps again, bit for bit
explain.py             computes each group's gradient in a learner step

A group's way: `Prefetch` claims it, `prepare_batch` reads it, `scored_rows` computes advantages
(of a run with a critic, from `Critic.values`), `cut_updates` and `micro_batches` make tensors,
`train_batch` and `Engine.train` compute the gradient and apply it. `Learner.run` then settles its
batch: `settle` in store/catalog/batches.py makes the group trained.

A version's way: before it settles, `Learner.run` copies the weights (`WeightsCopy.take`) and gives
them the next number (`Coordinator.announce`). They are sent and written behind the next learner
step (`WeightsCopy.write`). actors/inference/weight_sync.py has an engine load them.
"""

import lazy_loader

# `__init__.pyi` lists the public names. Each is imported on first use, so that `--help` and errors
# of the command line load neither Arrow nor torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
