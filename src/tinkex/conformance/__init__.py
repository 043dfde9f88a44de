"""
Conformance checks for Tinker servers, over plain HTTP.

    tinkex conformance http://127.0.0.1:8000 --api-key tml-...
    TINKER_BASE_URL=http://127.0.0.1:8000 pytest --pyargs tinkex.conformance

Each check is a function with the requirements it covers and a sentence that says what is expected.
The suite needs NumPy but not torch. It creates its own sessions, models and checkpoints.
"""

from tinkex.conformance.raw_client import Remote
from tinkex.conformance.registry import CHECKS, Check, Outcome, Report, Verdict, run

__all__ = ["CHECKS", "Check", "Outcome", "Remote", "Report", "Verdict", "run"]
