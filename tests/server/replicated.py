"""A fake executor with several engines of one base model, each with its own memory."""

import asyncio
from pathlib import Path

from server.echo import BASE, EchoExecutor
from tinkex.server.executor import OnTokens, ServedModel
from tinkex.wire.proto.frames_pb2 import Done, Order, Ready, Stats


class ReplicatedExecutor:
    """Engines that a test can crash, hold down and start again, by number."""

    def __init__(self, replicas: int) -> None:
        self.served = (ServedModel(name=BASE, folder=Path("/"), replicas=replicas),)
        self._names = self.served[0].engines
        self.engines = [EchoExecutor() for _ in self._names]
        self._up = [asyncio.Event() for _ in self._names]
        for number, engine in enumerate(self.engines):
            engine._incarnation = 1000 * number + 1
            self._up[number].set()

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def ready(self, engine: str, /) -> int:
        number = self._names.index(engine)
        await self._up[number].wait()
        return await self.engines[number].ready(engine)

    async def send(
        self,
        engine: str,
        order: Order,
        /,
        *,
        incarnation: int | None = None,
        on_tokens: OnTokens | None = None,
    ) -> asyncio.Future[Done]:
        await self.ready(engine)
        found = self.engines[self._names.index(engine)]
        return await found.send(engine, order, incarnation=incarnation, on_tokens=on_tokens)

    def waiting_for(self, engine: str, /) -> str | None:
        return None if self.stats(engine) is not None else f"the engine of {engine} is starting"

    def facts(self, engine: str, /) -> Ready | None:
        return None

    def stats(self, engine: str, /) -> Stats | None:
        return Stats() if self._up[self._names.index(engine)].is_set() else None

    def crash(self, number: int, *, stays_down: bool = False) -> None:
        """Lose the memory and all running work; restart at once or with `restart`."""
        if stays_down:
            self._up[number].clear()
        self.engines[number].die()

    def restart(self, number: int) -> None:
        self._up[number].set()

    def models(self, number: int) -> set[str]:
        """The models in the memory of an engine."""
        return set(self.engines[number].models)

    def samples(self, number: int) -> int:
        """The samples that an engine has run."""
        return len(self.engines[number].tasks("sample"))
