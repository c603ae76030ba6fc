"""Tools of developers: faults, fuzzing, leaks, equality and single measurements. ``python -m devtools`` lists them.

They run from a checkout and are no part of the wheel. Their processes start others of this folder, which must find it
wherever they run.
"""

import os
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[1])
_PATHS = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
if _ROOT not in _PATHS:
    os.environ["PYTHONPATH"] = os.pathsep.join([*_PATHS, _ROOT])
