"""What the rules of the store's model find wrong is told as fully as in a test of their own."""

import pytest

pytest.register_assert_rewrite("server.store.machine")
