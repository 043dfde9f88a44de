"""A sample that is read while it is drawn, by any number of readers."""

import asyncio

from tinkex.wire.growing import Growing
from tinkex.wire.proto import frames_pb2


class Tap:
    """What an engine has told of a sample so far. Belongs to one event loop."""

    def __init__(self) -> None:
        self.growing = Growing()
        #: Done at the next token; then there is another one.
        self.changed = self._next()

    def hear(self, told: frames_pb2.Tokens) -> None:
        """An engine that was started again tells everything again; only what is new counts."""
        if self.growing.take(told.sequence, told.tokens, told.logprobs, start=told.start):
            changed, self.changed = self.changed, self._next()
            changed.set_result(None)

    def _next(self) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()
