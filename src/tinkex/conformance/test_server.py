"""The conformance checks as pytest tests."""

import pytest

from tinkex.conformance import CHECKS, Check, Remote
from tinkex.conformance.registry import Skipped


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_the_server(check: Check, remote: Remote) -> None:
    try:
        check.function(remote)
    except Skipped as reason:
        pytest.skip(str(reason))
