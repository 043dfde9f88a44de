"""
Records which functions of tinkex a Python process calls, phase by phase.

Python imports this module at start-up when its folder is on PYTHONPATH, so `qa/walk.py` can trace
a server's processes without changing them. The file `$TINKEX_TRACE/phase` names the current phase;
while it is empty nothing is recorded. Each process writes `$TINKEX_TRACE/<pid>.json` after a phase.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

#: How often the phase file is read. `walk.py` waits longer than this after each change.
INTERVAL_S = 0.02


class Recorder:
    """Collects code objects for the current phase. The profile callback must stay cheap."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._phase = ""
        #: In the order of the first call.
        self._seen: dict[str, dict[CodeType, None]] = {}
        self._now: dict[CodeType, None] = {}

    def start(self) -> None:
        threading.Thread(target=self._follow, name="trace", daemon=True).start()
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, _argument: Any) -> None:
        if self._phase and event == "call":
            self._now.setdefault(frame.f_code)

    def _follow(self) -> None:
        while True:
            phase = (self._folder / "phase").read_text()
            if phase != self._phase:
                ended = self._phase
                self._now = self._seen.setdefault(phase, {})
                self._phase = phase
                if ended:
                    self._write()
            time.sleep(INTERVAL_S)

    def _write(self) -> None:
        found = {
            phase: [
                [code.co_filename, code.co_qualname]
                for code in list(codes)
                if f"{os.sep}tinkex{os.sep}" in code.co_filename
            ]
            for phase, codes in self._seen.items()
            if phase
        }
        target = self._folder / f"{os.getpid()}.json"
        part = target.with_suffix(".part")
        part.write_text(json.dumps(found))
        part.replace(target)


# Engine processes are not traced: the hook would make their imports of torch very slow.
if (folder := os.environ.get("TINKEX_TRACE")) and "tinkex.engine" not in sys.orig_argv:
    Recorder(Path(folder)).start()
