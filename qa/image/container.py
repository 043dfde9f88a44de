"""Builds images with buildah, and runs them as Docker would, with the namespaces of the kernel."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import processes
from waiting import until

#: The root of a container, in a mount namespace of its own: $1. Then pairs of a folder outside and its
#: place inside, `--`, and the command. The root is read-only, and /tmp is new.
ENTER = """
root=$1; shift
mount --make-rprivate /
mount --bind "$root" "$root"
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
while [ "$1" != -- ]; do
  mount --bind "$1" "$root$2"
  shift 2
done
shift
mount -o remount,bind,ro "$root"
[ -z "$OWN_NETWORK" ] || ip link set lo up
exec chroot "$root" "$@"
"""


class Buildah:
    """One store of images."""

    def __init__(self, store: Path) -> None:
        self._command = ["buildah", "--root", f"{store}/images", "--runroot", f"{store}/run"]

    def __call__(self, *arguments: str | Path) -> str:
        """Run a command, and return its output. Ends the program with what it said if it fails."""
        command = [*self._command, *arguments]
        env = {**os.environ, "BUILDAH_ISOLATION": "chroot"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{done.stdout[-10_000:]}\n{done.stderr[-5_000:]}")
        return done.stdout.strip()

    def has(self, image: str) -> bool:
        return image in self("images", "--format", "{{.Name}}:{{.Tag}}").split()

    @contextlib.contextmanager
    def mounted(self, image: str) -> Iterator[Path]:
        """The root folder of a container that is deleted afterwards."""
        name = self("from", "--pull-never", image)
        try:
            yield Path(self("mount", name))
        finally:
            self("rm", name)


@dataclass(kw_only=True)
class Image:
    """A mounted image, and what its Dockerfile says about containers."""

    root: Path
    config: Mapping[str, Any]

    def enter(self, env: Mapping[str, str]) -> list[str]:
        """Becomes the user of the image, without the right to become another one."""
        uid = self.config["User"]
        become = ["setpriv", "--reuid", uid, "--regid", uid, "--clear-groups"]
        become += ["--no-new-privs", "--bounding-set=-all"]
        passwd = (self.root / "etc/passwd").read_text().splitlines()
        (home,) = [line.split(":")[5] for line in passwd if line.split(":")[2] == uid]
        variables = [*self.config["Env"], *(f"{name}={value}" for name, value in env.items())]
        folder = f"--chdir={self.config['WorkingDir']}"
        return [*become, "env", "--ignore-environment", folder, f"HOME={home}", *variables]


@dataclass(kw_only=True)
class Container:
    """A running command of an image, as process 1 of its own namespace."""

    image: Image
    process: subprocess.Popen[str]
    env: Mapping[str, str]
    output: list[str] = field(default_factory=list)

    def run(
        self, command: Sequence[str], *, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run another command in the container (`docker exec`)."""
        enter = ["nsenter", "--target", str(self.pid), "--mount", "--pid", "--net", "--root"]
        return subprocess.run(
            [*enter, *self.image.enter(self.env), *command],
            capture_output=True,
            text=True,
            check=check,
        )

    @property
    def pid(self) -> int:
        """The number outside of the container's process 1."""
        until(lambda: processes.children(self.process.pid) or self.process.poll() is not None)
        (child,) = processes.children(self.process.pid)
        return child

    def stop(self, within_s: float) -> int:
        """`docker stop`: SIGTERM, and TimeoutExpired if it still runs after the grace period."""
        os.kill(self.pid, signal.SIGTERM)
        return self.process.wait(within_s)


@contextlib.contextmanager
def container(
    image: Image,
    command: Sequence[str],
    *,
    volumes: Mapping[Path, str],
    env: Mapping[str, str],
    own_network: bool = True,
) -> Iterator[Container]:
    """Runs a command in a container until the block ends. The image must have the volumes' folders."""
    unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    if own_network:
        unshare.append("--net")
    places = [word for outside, inside in volumes.items() for word in (str(outside), inside)]
    enter = [*image.enter(env), *command]
    started = subprocess.Popen(
        [*unshare, "sh", "-euc", ENTER, "sh", str(image.root), *places, "--", *enter],
        env={**os.environ, "OWN_NETWORK": "1" if own_network else ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert started.stdout
    running = Container(image=image, process=started, env=env)
    reader = threading.Thread(target=running.output.extend, args=(started.stdout,))
    reader.start()
    try:
        yield running
    finally:
        started.kill()
        started.wait()
        reader.join()
        started.stdout.close()
