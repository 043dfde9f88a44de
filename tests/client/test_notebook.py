"""In a real kernel of Jupyter, progress is one output that is replaced, and results are tables."""

import queue
import re
import sys
import time
from collections.abc import Iterator

import pytest
from jupyter_client.manager import KernelManager

from tinkex.client.observe.progress import Row, as_html
from tinkex.client.observe.queue_states import QueueState

PROGRAM = """
import tinkex
from tinkex.testing import FakeService

fake = FakeService()
hold = fake.hold("retrieve_future")
service = fake.client()
datum = tinkex.Datum(
    model_input=tinkex.ModelInput.from_ints([1, 2, 3]),
    loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
)
with tinkex.progress(every_s=0.05):
    import threading
    threading.Timer(0.5, hold.release).start()
    training = service.create_lora_training_client("fake/model")
    results = [training.forward_backward([datum], "cross_entropy") for _ in range(3)]
    for each in results:
        each.result()
results[0].result()
"""


@pytest.fixture
def messages(tmp_path, monkeypatch) -> Iterator[list[dict]]:
    """What the kernel sent while it ran the program."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=30)
        request = client.execute(PROGRAM)
        found, end = [], time.monotonic() + 30
        while time.monotonic() < end:
            try:
                message = client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            found.append(message)
            content, parent = message["content"], message["parent_header"].get("msg_id")
            if parent == request and content.get("execution_state") == "idle":
                break
        yield found
    finally:
        # Starting a kernel imports it here too, and tinkex would take this process for a notebook.
        for name in [name for name in sys.modules if name.partition(".")[0] == "ipykernel"]:
            del sys.modules[name]
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_notebook_has_one_live_bar_and_tables(messages):
    kinds = [each["msg_type"] for each in messages]
    assert "error" not in kinds, messages
    assert "stream" not in kinds, messages  # nothing on stderr
    first = next(each for each in messages if each["msg_type"] == "display_data")
    assert kinds.count("display_data") == 1
    updates = [each["content"] for each in messages if each["msg_type"] == "update_display_data"]
    assert updates
    shown = first["content"]["transient"]["display_id"]
    assert {each["transient"]["display_id"] for each in updates} == {shown}
    # All of it belongs to the cell that ran, so a notebook puts it there.
    parents = {
        each["parent_header"]["msg_id"] for each in messages if "display_data" in each["msg_type"]
    }
    assert len(parents) == 1
    last = updates[-1]["data"]
    assert re.search(
        r"forward_backward</td><td><progress value=\"3\" max=\"3\">", last["text/html"]
    )
    assert "forward_backward 3/3" in last["text/plain"]
    result = next(
        each["content"]["data"] for each in messages if each["msg_type"] == "execute_result"
    )
    assert "loss:sum" in result["text/html"]
    assert result["text/plain"].startswith("ForwardBackwardOutput(metrics={'loss:sum': ")


def test_the_bars_escape_what_a_server_says():
    row = Row(name="<sample>", done=3, failed=1, in_flight=2, waiting=4)
    paused = QueueState(subject="s", state="paused_capacity", reason="<script>alert(1)</script>")
    html = as_html([row], [paused])
    assert "<script>" not in html
    assert "&lt;sample&gt;" in html
    assert '<progress value="4" max="10">' in html
    assert "1 failed, paused: &lt;script&gt;" in html
