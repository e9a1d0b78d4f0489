from __future__ import annotations
import re
def nouns(name): return [w.lower() for w in re.findall(r"[^\W\d_]+", name)]
