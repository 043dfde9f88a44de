"""Full assertion messages for the rules of the stateful test."""

import pytest

pytest.register_assert_rewrite("server.store.machine")
