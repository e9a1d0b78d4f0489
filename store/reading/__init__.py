"""What outside readers see: the manifest, the exported tables behind it, the SQL views over them,
the sandboxed reader.

`trained.py` says what a learner step was trained on.
"""
