"""Prove on one bare GPU whatever can be proven there without vLLM and without Ray.

`__main__.py` runs each section in a process of its own and writes its result into one JSON file.
`report.py` records a section's checks and figures. `shapes.py` holds the sizes, `models.py` makes
random models of them, `engines.py` the learner's engine of a model, `flops.py` counts operations.
Each other module is one section, except `ray_stand_in.py` and `wheels.py` (packages to carry).
"""
