"""
Checks that any Tinker server should pass, run over plain HTTP.

    tinkex conformance http://127.0.0.1:8000 --key tml-...
    TINKER_BASE_URL=http://127.0.0.1:8000 pytest --pyargs tinkex.conformance

Each check is a function that names the requirement it is about and says in a sentence what is right.
It needs the wire types and NumPy, no torch, and makes sessions, models and checkpoints of its own.
"""

from tinkex.conformance.raw_client import Remote
from tinkex.conformance.registry import CHECKS, Check, Outcome, Report, Verdict, run

__all__ = ["CHECKS", "Check", "Outcome", "Remote", "Report", "Verdict", "run"]
