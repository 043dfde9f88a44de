"""
Many samples, a copy of a sampling client in another process, and all queries of sessions.

    python rest_program.py BASE_MODEL

Runs in the SDK's own environment, with TINKER_BASE_URL and TINKER_API_KEY set; prints one line of JSON.
"""

import datetime
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import urllib.request
import warnings

import tinker
from tinker import types

SAMPLES = 60
OF_COPY = 15
PROMPT = types.ModelInput.from_ints([20, 21, 22, 23])
PARAMS = types.SamplingParams(max_tokens=3, temperature=1.0)


def draw(sampler: tinker.SamplingClient, count: int) -> int:
    """Runs concurrent samples; the number of tokens."""
    futures = [sampler.sample(PROMPT, 2, PARAMS) for _ in range(count)]
    sequences = [one for future in futures for one in future.result().sequences]
    assert len(sequences) == 2 * count
    return sum(len(one.tokens) for one in sequences)


def copied(sampler: tinker.SamplingClient) -> int:
    """The same in another process, while the original client samples too."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(pickle.dumps(sampler))
        file.flush()
        copy = subprocess.Popen([sys.executable, __file__, "--copy", file.name], stdout=-1)
        mine = draw(sampler, OF_COPY)
        output, _ = copy.communicate()
        # SDK 0.36.0 may abort while the interpreter exits.
        assert copy.returncode in (0, -signal.SIGABRT)
    return mine + int(output.splitlines()[-1])


def rest(service: tinker.ServiceClient, session_id: str) -> dict[str, object]:
    client = service.create_rest_client()
    found: dict[str, object] = {"listed": client.list_sessions(limit=5).result().sessions}
    session = client.get_session(session_id).result()
    found |= {"runs": session.training_run_ids, "samplers": session.sampler_ids}
    client.assign_session_project(session_id, "a-project").result()
    url = client.export_session_trace(session_id).result()
    with urllib.request.urlopen(url) as answer:
        found["trace"] = len(json.load(answer)["traceEvents"])
    return found


def newest(session_id: str, url: str) -> dict[str, object]:
    """Queries that only 0.36.0 has."""
    service = tinker.ServiceClient(base_url=url)
    client = service.create_rest_client()
    wanted = types.SessionSearchRequest(
        project_ids=["a-project"],
        statuses=[{"type": "active"}],
        limit=1,
    )
    page = client.search_sessions(wanted).result()
    hour = datetime.datetime.now(datetime.UTC).replace(minute=0, second=0, microsecond=0)
    later = datetime.timedelta(hours=1)
    usage = client.get_billing_usage(hour - later, hour + later).result()
    mine = [event for event in usage.data if event.session_id == session_id]
    storage = client.get_current_checkpoint_storage_usage().result()
    audit = client.get_audit_log("projects").result()
    return {
        "search": [one.session_id for one in page.sessions],
        "status": page.sessions[0].status.type,
        "usage": [event.event_info.model_dump() for event in mine],
        "storage": len(storage.data),
        "audit": [entry.event_details for entry in audit.entries],
    }


def main(base_model: str) -> None:
    service = tinker.ServiceClient(user_metadata={"why": "a test"})
    sampler = service.create_sampling_client(base_model=base_model)
    tokens = draw(sampler, SAMPLES) + copied(sampler)
    session_id = service.create_rest_client().list_sessions(limit=1).result().sessions[0]
    result: dict[str, object] = {
        "version": tinker.__version__,
        "session_id": session_id,
        "tokens": tokens,
        **rest(service, session_id),
    }
    if hasattr(types, "SessionSearchRequest"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result |= newest(session_id, os.environ["TINKER_BASE_URL"])
    print(json.dumps(result))


if __name__ == "__main__":
    if sys.argv[1] == "--copy":
        with open(sys.argv[2], "rb") as file:
            print(draw(pickle.loads(file.read()), OF_COPY))
    else:
        main(sys.argv[1])
