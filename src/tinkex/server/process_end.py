"""How a child process ended: by itself, or stopped by somebody."""

import contextlib
import signal
from dataclasses import dataclass
from pathlib import Path

from tinkex.wire import engine_protocol

#: The exit status of a worker whose name another process has taken. Whoever starts it again would
#: replace that one, and so on in turn.
REPLACED_STATUS = 3
#: Signals that end a process from outside. Others, such as SIGSEGV, come from a crash.
_EXTERNAL_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    #: The exit status, negative for a signal.
    status: int
    #: How many processes the kernel killed for lack of memory while this one ran.
    oom_kills: int = 0

    @property
    def by_itself(self) -> bool:
        """Whether it exited or crashed, or the kernel killed it for lack of memory."""
        if self.status >= 0 or -self.status not in _EXTERNAL_SIGNALS:
            return True
        return self._out_of_memory

    @property
    def _out_of_memory(self) -> bool:
        return self.status == -signal.SIGKILL and self.oom_kills > 0

    def __str__(self) -> str:
        if self._out_of_memory:
            return "SIGKILL: the system had no memory left"
        if self.status == -signal.SIGKILL:
            return "SIGKILL: killed from outside"
        if self.status == engine_protocol.DEVICE_LOST_STATUS:
            return "its device failed or ran out of memory; see its log"
        if self.status == engine_protocol.RANK_LOST_STATUS:
            return "one of its ranks was lost; see its log"
        if self.status < 0:
            return signal.Signals(-self.status).name
        return f"exit status {self.status}"


def oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory since boot."""
    with contextlib.suppress(OSError), Path("/proc/vmstat").open() as figures:
        return sum(int(line.split()[1]) for line in figures if line.startswith("oom_kill "))
    return 0
