"""
A fleet on a Ray cluster. The only module of tinkex that imports Ray.

Each worker is a detached actor with a name, such as `Qwen/Qwen3-8B#0`: it stays when this process
ends, and Ray starts it again when its process or its node is lost. So the named actors are the record
of what is wanted, and nothing else has to run.
"""

import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tinkex.server.fleet.plan import (
    Changes,
    FleetError,
    WorkerGroup,
    changes,
    is_worker_name,
    model_of,
    number_of,
)
from tinkex.server.fleet.worker_actor import (
    DRAINING,
    ENDED,
    FAILING,
    READY,
    REPLACED,
    WorkerActor,
    WorkerReport,
)

NAMESPACE = "tinkex"
#: An actor that does not answer for this long has no node, or a node that is lost.
ANSWER_S = 5.0
#: How long to wait for a worker to drain; longer than the actor itself waits.
STOP_S = 330.0
CONNECT_S = 5.0
#: How long to wait for new workers: they may have to fetch their base model.
READY_S = 900.0

Say = Callable[[str], object]


class RayFleet:
    """The workers on one Ray cluster. `say` is told what happens, in words."""

    def __init__(self, address: str | None, say: Say) -> None:
        self._ray = _connected(address)
        self._say = say
        #: The actors that this process has created, by name.
        self._created: dict[str, Any] = {}

    def close(self) -> None:
        self._ray.shutdown()

    def workers(self) -> dict[str, WorkerReport | None]:
        """All workers by name; None for one that does not answer, because Ray has no node for it."""
        names = filter(is_worker_name, self._ray.util.list_named_actors())
        asked = {}
        for name in sorted(names, key=lambda name: (model_of(name), number_of(name))):
            handle = self._actor(name)
            if handle is not None:
                asked[handle.report.remote()] = name
        if not asked:
            return {}
        answered, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)
        reports: dict[str, WorkerReport | None] = dict.fromkeys(asked.values())
        for reference in answered:
            try:
                reports[asked[reference]] = self._ray.get(reference)
            except self._ray.exceptions.RayActorError:
                continue  # it has just ended; Ray starts it again
        return reports

    def apply(self, wanted: Iterable[WorkerGroup]) -> Changes:
        """Start, replace and stop workers until they are the wanted ones; returns what changed."""
        found = {
            name: None if report is None else report.group
            for name, report in self._without_leaving(self.workers()).items()
        }
        needed = changes(wanted, found)
        self.stop(needed.stop)
        for name, group in needed.start.items():
            self.start(name, group)
        # One after the other, so that the others serve meanwhile. Before that, the workers that have
        # the new options already must be ready, perhaps since a command that failed.
        kept = {name: group for name, group in found.items() if name not in needed.stop}
        for name, group in needed.replace.items():
            self._expect_ready(other for other, had in kept.items() if had and had.runs_like(group))
            self.stop([name])
            self.start(name, group)
            self._expect_ready([name])
        return needed

    def scale(self, model: str, replicas: int) -> Changes:
        """Give a base model this many workers, with the options of those that it has."""
        reports = self.workers()
        of_model = {name: reports[name] for name in reports if model_of(name) == model}
        if not of_model:
            models = ", ".join(sorted({model_of(name) for name in reports})) or "none"
            raise FleetError(
                f"the fleet has no workers of {model}. It has workers of: {models}.",
                hint="Add the model to the fleet file, and run `tinkex fleet up FILE`.",
            )
        groups = [report.group for report in of_model.values() if report is not None]
        if not groups and replicas > len(of_model):
            raise FleetError(
                f"no worker of {model} runs yet, so that its options are not known.",
                hint="Change `replicas` in the fleet file, and run `tinkex fleet up FILE`.",
            )
        group = groups[0] if groups else WorkerGroup(model=model)
        wanted = group.model_copy(update={"replicas": replicas})
        needed = changes([wanted], dict.fromkeys(self._without_leaving(of_model)))
        self.stop(needed.stop)
        for name, its_group in needed.start.items():
            self.start(name, its_group)
        return needed

    def _without_leaving(
        self, reports: Mapping[str, WorkerReport | None]
    ) -> dict[str, WorkerReport | None]:
        """End the workers that an interrupted command has drained or begun to; the others."""
        leaving = [
            name
            for name, report in reports.items()
            if report is not None and report.state in (DRAINING, ENDED)
        ]
        self.stop(leaving)
        return {name: report for name, report in reports.items() if name not in leaving}

    def start(self, name: str, group: WorkerGroup) -> None:
        """Create an actor. If no node has what it needs, Ray keeps it waiting and may add a node."""
        self._say(f"{name}: wants a node with {group.needs}")
        actor = self._ray.remote(WorkerActor).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            num_gpus=group.gpus,
            num_cpus=group.cpus,
            resources=group.resources or None,
            # On different nodes if possible, so that a lost node is one lost replica.
            scheduling_strategy="SPREAD",
            max_restarts=-1,
            max_task_retries=0,
            # `report` answers while `drain` waits.
            max_concurrency=4,
        )
        self._created[name] = actor.remote(name, group)

    def stop(self, names: Iterable[str]) -> None:
        """Drain workers, all at once, and end their actors."""
        draining = {}
        for name in names:
            handle = self._actor(name)
            if handle is None:
                continue
            self._say(f"{name}: draining; its models go to other workers")
            draining[name] = (handle, handle.drain.remote())
        until_s = time.monotonic() + STOP_S
        for name, (handle, drained) in draining.items():
            try:
                # One without a node never answers.
                wait_s = max(ANSWER_S, until_s - time.monotonic()) if self._runs(handle) else 0.0
                done = self._ray.get(drained, timeout=wait_s)
            except (self._ray.exceptions.GetTimeoutError, self._ray.exceptions.RayActorError):
                done = False
            self._ray.kill(handle, no_restart=True)
            self._say(f"{name}: ended" if done else f"{name}: ended without draining")

    def _expect_ready(self, names: Iterable[str]) -> None:
        """Refuse to replace more workers by ones that may not run."""
        for name in names:
            if not self.wait_until_ready([name]):
                raise FleetError(
                    f"{name} is not ready; the workers with other options were left as they are.",
                    hint="`tinkex fleet status` says why. Correct the file or the node, and run the "
                    "command again.",
                )

    def wait_until_ready(self, names: Iterable[str]) -> bool:
        """Wait for workers, and say what each of them does; False if one is not ready in time."""
        said: dict[str, str] = {}
        waiting = set(names)
        until_s = time.monotonic() + READY_S
        while waiting:
            reports = self.workers()
            for name in sorted(waiting):
                if name not in reports:
                    self._check_created(name)
                report = reports.get(name)
                words = in_words(report)
                if said.get(name) != words:
                    self._say(f"{name}: {words}")
                    said[name] = words
                if report is not None and report.state == READY:
                    waiting.discard(name)
                if report is not None and report.state == REPLACED:
                    raise FleetError(
                        f"{name} ended: another process on the same database has its name.",
                        hint="End that process (another fleet, or `tinkex worker --name`), then "
                        "`tinkex fleet scale` to 0 and back, or `down` and `up`.",
                    )
            if waiting:
                if time.monotonic() > until_s:
                    return False
                time.sleep(0.5)
        return True

    def _check_created(self, name: str) -> None:
        """Raise what an actor said that ended while it was created: Ray does not try again."""
        if name not in self._created:
            return  # another command has ended it
        try:
            self._ray.get(self._created[name].report.remote(), timeout=ANSWER_S)
        except self._ray.exceptions.GetTimeoutError:
            return
        except self._ray.exceptions.RayActorError as error:
            said = str(error).strip().rpartition("\n")[2]
            raise FleetError(
                f"{name} cannot run: {said}.", hint="Correct that, and run the command again."
            ) from error

    def _actor(self, name: str) -> Any:
        try:
            return self._ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            return None  # it ended between the list and this call

    def _runs(self, handle: Any) -> bool:
        answered, _ = self._ray.wait([handle.report.remote()], timeout=ANSWER_S)
        return bool(answered)


def in_words(report: WorkerReport | None) -> str:
    """What a worker does, for people."""
    if report is None:
        return "waiting for a node"
    last = report.log.rpartition("\n")[2]
    if report.state == FAILING:
        return f"failing on {report.node}, and started again: {last}"
    if report.state == REPLACED:
        return f"ended on {report.node}, because another process has its name"
    return f"{report.state} on {report.node}"


def _connected(address: str | None) -> Any:
    """The module of Ray, connected to a cluster that is there."""
    import ray

    chosen = address or os.environ.get("RAY_ADDRESS") or "auto"
    hint = (
        "Start one with `ray start --head` (docs/guides/scale-out.md), run this command on one of its "
        "nodes, and check --address, RAY_AUTH_MODE=token and the token of this user."
    )
    host, _, port = chosen.rpartition(":")
    try:
        if port.isdigit():
            # Ray itself would try for minutes.
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        ray.init(
            address=chosen, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR
        )
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        said = str(error).strip().partition("\n")[0].rstrip(".")
        raise FleetError(
            f"there is no Ray cluster at {chosen} that accepts this program: {said}.", hint=hint
        ) from error
    return ray
