"""
Quality-assurance programs that `make` targets run: long runs, comparisons and recordings.

Run them from the root of the repository as modules, for example `python -m qa.chaos.run`. They share
the helpers of `tests/`, such as `serving` and `sdk_envs`, which this package puts on the import path.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
