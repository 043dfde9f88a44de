"""
Builds the image of deploy/Dockerfile and runs it: python -m qa.image.run (`make image`)

Docker is not needed: buildah builds, and containers are processes in namespaces of their own, with a
read-only root, one user and no capabilities. The base image is a Debian of the same release with its
Python, made by debootstrap. torch is the one that pip of this machine finds: for CPUs if a wheel or an
index of its settings has that, else for CUDA.

Checked: a server without keys does not start; with one it gets ready as HEALTHCHECK tells, serves the
console, trains and samples; SIGTERM ends it within the grace period of compose.yaml; what it stored is
there at the next start; and a web process and a worker share PostgreSQL and a storage as in
compose-cluster.yaml. A change of the source must leave the layer of the dependencies as it is. At last
systemd boots in the image, and runs the unit tinkex.service with all that the unit forbids.

Needs root, 10 GB, and Debian's buildah, debootstrap, iproute2, postgresql and systemd-container. Base and
layers are kept in the cache folder ($TINKEX_CACHE), so that the next run takes two minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import yaml

from postgres import postgres_server
from qa.image.booted import booted
from qa.image.container import Buildah, Container, Image, container
from tinkex.models.cache import cache_folder
from tinkex.testing import write_tiny_model
from waiting import until

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PROGRAMS = ("buildah", "debootstrap", "ip", "nsenter", "systemd-nspawn", "unshare")
BASE, IMAGE = "localhost/tinkex-check-base:latest", "localhost/tinkex-check:latest"
#: Of `ARG BASE`: the same release.
RELEASE = "bookworm"
PYTHON = "ca-certificates,python-is-python3,python3,python3-pip,python3-venv"
SYSTEMD = "dbus,systemd,systemd-sysv"
#: What the image is built from, beside src; deploy/Dockerfile.dockerignore lists the same.
CONTEXT = ("pyproject.toml", "constraints.txt", "README.md", "LICENSE")
CA_FILE = Path("/etc/ssl/certs/ca-certificates.crt")
UID = 1000
READY_S = 120.0

#: A client in the container: trains a step, samples, and reads the page for browsers.
CLIENT = """
import sys, urllib.request
import tinkex
from tinkex import types

url = "http://127.0.0.1:" + sys.argv[1]
with tinkex.ServiceClient(base_url=url) as service:
    training = service.create_lora_training_client(base_model="test/tiny", rank=4, seed=0)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0] * 3},
    )
    passed = training.forward_backward([datum], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    print("loss", passed.result().metrics["loss:sum"])
    sampler = training.save_weights_and_get_sampling_client()
    prompt, params = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=4)
    sampler.sample(prompt, num_samples=1, sampling_params=params).result()
    print(training.save_state("kept").result().path)
page = urllib.request.Request(url, headers={"Accept": "text/html"})
print(urllib.request.urlopen(page).read().decode())
"""


def say(text: str) -> None:
    print(text, flush=True)


def expect(condition: object, problem: str) -> None:
    if not condition:
        raise SystemExit(f"FAILED: {problem}")


# -- building --------------------------------------------------------------------------------------


def make_base(buildah: Buildah, folder: Path) -> None:
    """An image with Debian and its Python, once."""
    if buildah.has(BASE):
        return
    say(f"making the base: Debian {RELEASE}")
    root = folder / "root"
    shutil.rmtree(root, ignore_errors=True)
    command = ["debootstrap", "--variant=minbase", f"--include={PYTHON},{SYSTEMD}"]
    subprocess.run([*command, RELEASE, str(root)], check=True, stdout=subprocess.DEVNULL)
    name = buildah("from", "scratch")
    buildah("copy", "--quiet", name, root, "/")
    buildah("commit", "--quiet", "--rm", name, BASE)
    shutil.rmtree(root)


def pip_settings(folder: Path) -> Iterator[str]:
    """Gives the settings of this machine's pip to the one in the build, with what they refer to."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    found = dict(re.findall(r"^[\w:-]+\.([a-z-]+)='(.*)'$", listed, re.MULTILINE))
    conf = folder / "pip.conf"
    conf.write_text("[global]\n" + "".join(f"{name} = {text}\n" for name, text in found.items()))
    yield from ("--volume", f"{conf}:/etc/pip.conf:ro")
    places = {CA_FILE}
    for word in (word for text in found.values() for word in text.split()):
        # The pages of an index may refer to files beside its folder.
        place = Path(word.removeprefix("file://"))
        places.add(place.parent if word.startswith("file://") else place)
    for place in places:
        if place.is_absolute() and place.exists():
            yield from ("--volume", f"{place}:{place}:ro")


def build(buildah: Buildah, context: Path, settings: list[str]) -> str:
    """Build the image for CPUs; returns what buildah said."""
    return buildah(
        *("build", "--layers", "--format", "docker", "--pull-never", "--tag", IMAGE),
        *("--file", DEPLOY / "Dockerfile", "--ignorefile", DEPLOY / "Dockerfile.dockerignore"),
        *("--build-arg", f"BASE={BASE}", "--build-arg", "DEVICE=cpu", *settings, context),
    )


def check_layers(buildah: Buildah, folder: Path, settings: list[str]) -> None:
    """Build the image twice; the second time another source must not change the dependencies."""
    context = folder / "context"
    shutil.copytree(ROOT / "src", context / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in CONTEXT:
        shutil.copy2(ROOT / name, context / name)
    with (context / "src/tinkex/__init__.py").open("a") as file:
        file.write(f"# {time.time()}\n")
    said = build(buildah, context, settings)
    (install,) = re.findall(r"STEP \d+/\d+: RUN .*pip install --constraint.*\n(.*)", said)
    expect("Using cache" in install, f"dependencies were installed again: {install}")


# -- running ---------------------------------------------------------------------------------------


def ready(running: Container) -> bool:
    """Whether HEALTHCHECK says so."""
    expect(running.process.poll() is None, "it ended:\n" + "".join(running.output))
    kind, *command = running.image.config["Healthcheck"]["Test"]
    expect(kind == "CMD", f"HEALTHCHECK {kind}")
    return running.run(command, check=False).returncode == 0


def check_server(image: Image, folder: Path, grace_s: float) -> None:
    """`docker run` of the image, with two volumes and a folder of models."""
    volumes = {folder / "data": "/var/lib/tinkex", folder / "cache": "/var/cache/tinkex"}
    for outside in volumes:
        outside.mkdir(mode=0o700)
        os.chown(outside, UID, UID)
    tiny = write_tiny_model(folder / "cache" / "tiny")
    for file in (tiny, *tiny.iterdir()):
        os.chown(file, UID, UID)
    env = {"TINKEX_MODELS": "test/tiny=/var/cache/tinkex/tiny"}
    command = image.config["Cmd"]

    say("a server without keys does not start")
    with container(image, command, volumes=volumes, env=env) as refused:
        expect(refused.process.wait(60) != 0, "a server without keys started")
    expect("no keys" in "".join(refused.output).replace("\n", " "), "".join(refused.output))

    say("with a key it gets ready, and a client trains, samples and reads the console")
    create = ["tinkex", "key", "create", "--owner", "me"]
    with container(image, create, volumes=volumes, env=env) as created:
        expect(created.process.wait(60) == 0, "".join(created.output))
    (key,) = re.findall(r"^tml-\S+", "".join(created.output), re.MULTILINE)
    env["TINKER_API_KEY"] = key
    for start in ("first", "second"):
        with container(image, command, volumes=volumes, env=env) as server:
            until(lambda server=server: ready(server), READY_S)
            if start == "first":
                said = server.run(["python", "-c", CLIENT, "8000"], check=False)
                expect("loss " in said.stdout, said.stdout + said.stderr)
                expect('src="console/app.js"' in said.stdout, "no console")
                saved = re.findall(r"^tinker://\S+", said.stdout, re.MULTILINE)[0]
            else:
                say("what it stored is there after the next start")
                listing = ["tinkex", "checkpoint", "list", "-f", "json"]
                address = ["--base-url", "http://127.0.0.1:8000"]
                listed = server.run([*listing, *address], check=False).stdout
                expect(saved in listed, f"no {saved} in {listed}")
            began = time.monotonic()
            status = server.stop(grace_s)
            say(f"SIGTERM ended it with status {status} after {time.monotonic() - began:.1f} s")
            expect(status == 0, "".join(server.output))
    owners = {file.stat().st_uid for file in (folder / "data").rglob("*")}
    expect(owners == {UID}, f"files of users {owners}")


def check_cluster(image: Image, folder: Path) -> None:
    """A web process and a worker, each with a data folder of its own, as in compose-cluster.yaml."""
    say("a web process and a worker share PostgreSQL and a storage")
    services = yaml.safe_load((DEPLOY / "compose-cluster.yaml").read_text())["services"]
    shared = folder / "storage"
    with contextlib.ExitStack() as stack:
        env = {
            "TINKEX_DB": stack.enter_context(postgres_server()).database(),
            "TINKEX_STORAGE": "/srv/tinkex",
        }
        started: dict[str, Container] = {}
        for name in ("key", "web", "worker"):
            data = folder / name
            for outside in (shared, data):
                outside.mkdir(exist_ok=True)
                os.chown(outside, UID, UID)
            volumes = {
                shared: "/srv/tinkex",
                data: "/var/lib/tinkex",
                folder / "cache": "/var/cache/tinkex",
            }
            if name == "key":
                command = ["tinkex", "key", "create", "--owner", "me"]
            elif name == "web":
                command = [*services["web"]["command"], "--port", "0"]
            else:
                command = [*services["worker"]["command"][:2], "test/tiny=/var/cache/tinkex/tiny"]
            running = stack.enter_context(
                container(image, command, volumes=volumes, env=env, own_network=False)
            )
            if name == "key":
                expect(running.process.wait(60) == 0, "".join(running.output))
                until(lambda running=running: running.output)
                (env["TINKER_API_KEY"],) = re.findall(r"tml-\S+", "".join(running.output))
            started[name] = running
        address = r"tinkex ready at http://0\.0\.0\.0:(\d+)"
        web, worker = started["web"], started["worker"]
        until(lambda: re.search(address, "".join(web.output)), READY_S)
        until(lambda: re.search(r"tinkex worker \S+ ready", "".join(worker.output)), READY_S)
        port = re.findall(address, "".join(web.output))[0]
        said = web.run(["python", "-c", CLIENT, port], check=False)
        expect("loss " in said.stdout, said.stdout + said.stderr)
        for name in ("worker", "web"):
            grace_s = float(services[name]["stop_grace_period"].removesuffix("s"))
            status = started[name].stop(grace_s)
            expect(status == 0, f"{name}: status {status}\n" + "".join(started[name].output))


def check_unit(root: Path, folder: Path) -> None:
    """deploy/systemd/tinkex.service as systemd runs it. The image has tinkex where the unit expects it."""
    say("systemd runs tinkex.service")
    shutil.copy2(DEPLOY / "systemd" / "tinkex.service", root / "etc/systemd/system")
    (root / "etc/tinkex").mkdir()
    models = root / "srv/models"
    write_tiny_model(models / "tiny")
    for file in (models / "tiny").iterdir():
        file.chmod(0o644)
    (root / "etc/tinkex/serve.env").write_text("TINKEX_MODELS=test/tiny=/srv/models/tiny\n")
    python = "/opt/tinkex/bin/python"
    look = "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/readyz')"
    with booted(root, folder / "console.log") as machine:

        def journal() -> str:
            return machine.run("journalctl", "--no-pager", "--unit", "tinkex").stdout

        def wait_ready() -> None:
            try:
                until(lambda: machine.run(python, "-c", look).returncode == 0, READY_S)
            except AssertionError:
                raise SystemExit(f"FAILED: not ready\n{journal()}") from None

        machine.run("systemctl", "enable", "--now", "tinkex")
        wait_ready()
        client = ["runuser", "--user", "tinkex", "--", python, "-c", CLIENT, "8000"]
        said = machine.run(*client)
        expect("loss " in said.stdout, said.stdout + said.stderr + journal())
        machine.run("systemctl", "restart", "tinkex")
        expect("tinkex.service: Deactivated successfully" in journal(), journal())
        wait_ready()
        machine.run("systemctl", "kill", "--signal=KILL", "tinkex")
        until(lambda: "status=9/KILL" in journal(), READY_S)
        wait_ready()


def main() -> int:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        print(f"needs root, and these programs, which are missing: {' '.join(missing) or 'none'}")
        return 1
    store = cache_folder() / "image-check"
    store.mkdir(parents=True, exist_ok=True)
    buildah = Buildah(store)
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    grace_s = float(compose["services"]["cpu"]["stop_grace_period"].removesuffix("s"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        folder.chmod(0o755)
        make_base(buildah, store)
        say("building the image (the first time: five minutes)")
        settings = list(pip_settings(folder))
        build(buildah, ROOT, settings)
        check_layers(buildah, folder, settings)
        config = json.loads(buildah("inspect", "--type", "image", IMAGE))["Docker"]["config"]
        with buildah.mounted(IMAGE) as root:
            image = Image(root=root, config=config)
            check_server(image, folder, grace_s)
            check_cluster(image, folder)
        with buildah.mounted(IMAGE) as root:
            check_unit(root, folder)
    say("The image works.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
