"""Compute advantages from a table of steps, and losses from log-probabilities: GiGPO's mathematics.

queries/*.sql     the equations of the advantages, one idea a file; "eq." is an equation of GiGPO's
                  paper, arXiv 2505.10978. Other sources stand with their arXiv number, or with
                  authors or venue, and year. "Our form" is written by us: from an abstract, from
                  authors' code, or without a paper
sql_macro.py      their composition into one DuckDB macro, also for a bare DuckDB shell
settings.py       the settings of an advantage
advantages.py     runs the macro over a table of steps
input_columns.py  reads the caller's columns
similarity.py     anchor keys for similar texts
group_filter.py   groups that nothing can be learnt from
replay.py         advantages of earlier wins that are trained on again
tokens.py         the response tokens that losses read
losses.py, corrections.py   one entry per published idea, and a registry each; KL penalties
token_advantages.py  advantages of single tokens, by a critic's values
value_loss.py     the critic's loss
aggregations.py   the means of an update's losses per token
combinations.py   usual parts of each loss, and refusals of parts that do not go together
objective.py      the loss of an update: the equation of all parts
diagnostics.py    figures to watch

No I/O, no logging, no trainer. This package imports lazy_loader, duckdb, pyarrow, numpy, rapidfuzz
and, when it first computes a loss, torch (lazy_torch.py).
"""

import lazy_loader

# The public names stand in `__init__.pyi`.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
