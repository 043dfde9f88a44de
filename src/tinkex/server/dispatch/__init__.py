"""From accepted rows to engines and back: every model's steps in order, every sample at once."""

from tinkex.server.dispatch.dispatcher import Dispatcher

__all__ = ["Dispatcher"]
