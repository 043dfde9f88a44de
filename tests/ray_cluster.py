"""
A Ray cluster on this machine for tests: a head and nodes that can be lost.

It runs in a program of its own, because Ray reads its settings from the environment when it is
imported, and a test must not keep a connection. The program follows lines on its standard input.
"""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

#: Each node has one place, so that each gets one worker.
NODE = {"num_cpus": 2, "resources": {"place": 1}}
HEAD = {"num_cpus": 0, "include_dashboard": False}
STORE_BYTES = 80 * 2**20
SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A node that does not answer is lost after 3 s instead of 30.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


class RayCluster:
    """A running cluster. `env` is what a program needs to use it."""

    def __init__(self, process: subprocess.Popen[str], env: dict[str, str]) -> None:
        self._process = process
        self.env = {**env, "RAY_ADDRESS": self._answer()}

    def add_node(self) -> None:
        self._ask("add")

    def lose_node(self) -> None:
        """Kills the newest node; its workers may live a little longer."""
        self._ask("lose")

    def _ask(self, words: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{words}\n")
        self._process.stdin.flush()
        assert self._answer() == "done"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("cluster: "):
                return line.removeprefix("cluster: ").strip()
        raise AssertionError("the program of the cluster has ended")


@contextmanager
def ray_cluster(env: Mapping[str, str], nodes: int) -> Iterator[RayCluster]:
    """Runs until the block ends; `env` is the environment of the nodes."""
    known = {**SETTINGS, "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **env, **known},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        cluster = RayCluster(process, known)
        for _ in range(nodes):
            cluster.add_node()
        yield cluster
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


def main() -> None:
    from ray.cluster_utils import Cluster

    def say(words: str) -> None:
        sys.stdout.write(f"cluster: {words}\n")
        sys.stdout.flush()

    cluster = Cluster(
        initialize_head=True, head_node_args={**HEAD, "object_store_memory": STORE_BYTES}
    )
    try:
        say(cluster.address)
        nodes = []
        for line in sys.stdin:
            if line.strip() == "add":
                nodes.append(cluster.add_node(**NODE, object_store_memory=STORE_BYTES))
            else:
                cluster.remove_node(nodes.pop(), allow_graceful=False)
            say("done")
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
