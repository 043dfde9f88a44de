"""
Downloads and copies of checkpoints with the official SDK: 0.4.1 by archive, 0.36.0 by export.

    python files_program.py BASE_MODEL FOLDER

Runs in the SDK's own environment, with TINKER_BASE_URL and TINKER_API_KEY set; prints one line of JSON.
"""

import io
import json
import subprocess
import sys
import tarfile
import urllib.request
import warnings
from datetime import datetime
from pathlib import Path

import tinker
from tinker import types


def trained(service: tinker.ServiceClient, base_model: str) -> tinker.TrainingClient:
    """A model that has been trained, so that it differs from a new one."""
    training = service.create_lora_training_client(base_model=base_model, rank=4)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([20, 21, 22]),
        loss_fn_inputs={"target_tokens": [21, 22, 23], "weights": [1.0, 1.0, 1.0]},
    )
    training.forward_backward([datum], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return training


def fetched(url: str) -> bytes:
    """Downloads without a key and without headers."""
    with urllib.request.urlopen(url) as answer:
        return answer.read()


def by_archive(service: tinker.ServiceClient, base_model: str) -> dict[str, object]:
    rest = service.create_rest_client()
    training = trained(service, base_model)
    path = training.save_weights_for_sampler("files").result().path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        link = rest.get_checkpoint_archive_url_from_tinker_path(path).result()
    with tarfile.open(fileobj=io.BytesIO(fetched(link.url))) as archive:
        sizes = {member.name: member.size for member in archive.getmembers()}
    left_s = (link.expires - datetime.now(link.expires.tzinfo)).total_seconds()
    # This version does not know exports; a list that contains one would raise an error.
    listed = rest.list_user_checkpoints(limit=1000).result().checkpoints
    return {"path": path, "sizes": sizes, "left_s": left_s, "listed": len(listed)}


def by_export(service: tinker.ServiceClient, base_model: str, folder: Path) -> dict[str, object]:
    rest = service.create_rest_client()
    training = trained(service, base_model)
    path = training.save_weights_external("files", ttl_seconds=7200).result().path
    found = rest.get_external_weights_urls(path).result()
    files = {name: len(fetched(url)) for name, url in found.urls.items()}
    state = training.save_state("state", user_metadata={"k": "v"}).result().path
    tool = Path(sys.executable).with_name("tinker")
    download = [tool, "checkpoint", "download", state, "--output", folder]
    done = subprocess.run(download, capture_output=True, text=True, check=False)
    copied = service.copy_weights(state, ttl_seconds=7200).result()
    other = service.create_training_client_from_state(copied)
    rest.set_checkpoint_ttl_from_tinker_path(state, 3600).result()
    with_ttl = rest.list_checkpoints(state.split("/")[2]).result().checkpoints
    rest.set_checkpoint_ttl_from_tinker_path(state, None).result()
    without = rest.list_checkpoints(state.split("/")[2]).result().checkpoints
    return {
        "path": path,
        "files": files,
        "downloaded": [done.returncode, done.stderr, sorted(f.name for f in folder.rglob("*.*"))],
        "copied": copied,
        "loaded": other.get_info().model_data.model_name,
        "kinds": sorted(c.checkpoint_type for c in with_ttl),
        "expires": [c.expires_at is not None for c in with_ttl if c.tinker_path == state],
        "expires_not": [c.expires_at is not None for c in without if c.tinker_path == state],
    }


def main() -> None:
    base_model, folder = sys.argv[1], Path(sys.argv[2])
    if hasattr(tinker.TrainingClient, "save_weights_external"):
        service = tinker.ServiceClient(project_id="files")
        print(json.dumps(by_export(service, base_model, folder)))
    else:
        print(json.dumps(by_archive(tinker.ServiceClient(), base_model)))


if __name__ == "__main__":
    main()
