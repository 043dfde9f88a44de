"""How a worker ends whose name is not its own any more: a real one, on PostgreSQL."""

import queue
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from serving import TINY
from tinkex.server import engine_process
from tinkex.server.process_end import REPLACED_STATUS
from tinkex.server.settings import Settings
from tinkex.server.worker_process import run_worker

#: An engine that is ready and gets no work: none of this needs a model.
ENGINE = """
import socket, sys
from tinkex.wire import engine_protocol
from tinkex.wire.proto import frames_pb2
wire = socket.socket(fileno=int(sys.argv[1]))
wire.sendall(engine_protocol.frame(engine_protocol.Report(ready=frames_pb2.Ready(device="cpu"))))
while wire.recv(4096):
    pass
"""


def test_only_a_worker_that_was_replaced_asks_not_to_be_started_again(
    postgres, tiny_model, tmp_path, monkeypatch
):
    def command(descriptor, *_):
        return [sys.executable, "-c", ENGINE, str(descriptor)]

    monkeypatch.setattr(engine_process, "_command", command)
    db = postgres.database()
    stop = threading.Event()
    ready = queue.Queue()

    def run(name):
        settings = Settings(
            models=(f"{TINY}={tiny_model}",),
            db=db,
            storage=str(tmp_path / "storage"),
            data=str(tmp_path / name),
            name=name,
            threads=1,
        )
        return run_worker(settings, stop=stop, on_ready=ready.put)

    with ThreadPoolExecutor() as threads:
        try:
            # The first one creates the tables.
            first = threads.submit(run, "taken")
            assert ready.get(timeout=60) == "taken"
            second = threads.submit(run, "forgotten")
            assert ready.get(timeout=60) == "forgotten"
            with postgres.connect(db.rpartition("/")[2]) as connection:
                connection.execute("UPDATE workers SET term = term + 1 WHERE name = 'taken'")
                connection.execute("DELETE FROM workers WHERE name = 'forgotten'")
            assert first.result(30) == REPLACED_STATUS
            assert second.result(30) == 1
        finally:
            stop.set()
