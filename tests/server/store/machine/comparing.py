"""Invariants after every operation: tables and files match the reference model."""

from dataclasses import asdict, fields
from typing import Any

import sqlalchemy as sa
from hypothesis.stateful import invariant

from server.store.machine.base import Base
from server.stored_requests import unfinished
from tinkex.server.store.blobs import PREFIX_DEPTHS
from tinkex.server.store.schema import metadata


class Comparing(Base):
    """Compares every table and every file, directly and through the store."""

    @invariant()
    def tables_and_files_match_the_model(self) -> None:
        found = self.run(self.store._database.read(everything))
        self.compare_files(found)
        self.compare_rows(found)

    def compare_rows(self, found: dict[str, list[dict[str, Any]]]) -> None:
        world = self.world
        for table, expected in (
            ("sessions", world.sessions),
            ("models", world.models),
            ("samplers", world.samplers),
            ("checkpoint_versions", world.versions),
            ("checkpoint_names", world.names),
            ("snapshots", world.snapshots),
            ("completions", world.events),
            ("api_keys", world.keys),
        ):
            assert in_order(found[table], expected.values()) == in_order(
                [asdict(one) for one in expected.values()], expected.values()
            ), table
        rows = [self.with_bytes(row) for row in found["requests"]]
        assert in_order(rows, world.requests.values()) == in_order(
            [asdict(one) for one in world.requests.values()], world.requests.values()
        )
        fallbacks = {row["model_id"]: row["place"] for row in found["older_snapshots"]}
        assert fallbacks == {
            model_id: None if older is None else older.place
            for model_id, older in world.older.items()
        }
        used = {
            (row["owner"], row["hour"], row["session_id"], row["what"]): row["amount"]
            for row in found["usage"]
        }
        assert used == world.usage
        assert sorted((row["at_s"], row["event"]) for row in found["audit"]) == sorted(world.audit)

    def with_bytes(self, row: dict[str, Any]) -> dict[str, Any]:
        """A request with its payload and result, from the row or a file."""
        for name in ("payload", "result"):
            key = row[f"{name}_place"]
            assert key is None or row[name] is None
            if key is not None:
                row[name] = (self.folder / key).read_bytes()
            elif row[name] is not None:
                row[name] = bytes(row[name])
        return row

    def compare_files(self, found: dict[str, list[dict[str, Any]]]) -> None:
        """All referenced files exist, and no others except known orphans."""
        known = {row["place"] for row in found["checkpoint_versions"] if not row["discarded_s"]}
        known |= {row["place"] for row in found["snapshots"] + found["older_snapshots"]}
        for row in found["requests"]:
            known |= {row["payload_place"], row["result_place"]}
        known -= {None}
        there = set()
        for prefix, depth in PREFIX_DEPTHS.items():
            for path in (self.folder / prefix).glob("/".join("*" * depth)):
                there.add(str(path.relative_to(self.folder)))
        assert known <= there
        # Earlier orphans stay until they are deleted; deleted files do not become orphans.
        assert self.orphans <= there - known
        joined = sorted(key.partition("/")[0] for key in there - known - self.orphans)
        assert joined == sorted(self.left)
        self.orphans, self.left = there - known, []

    @invariant()
    def waiting_requests_logs_and_events_match_the_model(self) -> None:
        """Many reads, so not after every step."""
        self.steps += 1
        if self.steps % 3:
            return
        waiting = self.run(unfinished(self.store))
        assert {one.request_id for one in waiting} == {
            one.request_id for one in self.world.waiting()
        }
        for owner in {one.owner for one in waiting}:
            theirs = [one.request_id for one in waiting if one.owner == owner]
            came = [self.world.requests[one].created_s for one in theirs]
            assert came == sorted(came)
        for model_id in list(self.world.models)[:2]:
            log = self.run(self.store.requests.log(model_id, after=2))
            assert [one.request_id for one in log] == [
                one.request_id for one in self.world.log(model_id, after=2)
            ]
        for sampling_session_id in list(self.world.samplers)[:2]:
            positions = sorted(
                position
                for (sampler, position), event in self.world.events.items()
                if sampler == sampling_session_id and event.clone_id == 0
            )
            middle = positions[len(positions) // 2] if positions else 0
            events, newest = self.run(
                self.store.requests.completions(
                    sampling_session_id, 0, after=middle - 1, up_to=middle + 2
                )
            )
            assert [one.position for one in events] == [
                position for position in positions if middle <= position <= middle + 2
            ]
            assert newest >= self.world.newest_position(sampling_session_id)


def everything(connection: sa.Connection) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [dict(row._mapping) for row in connection.execute(sa.select(table))]
        for name, table in metadata.tables.items()
    }


def in_order(rows: list[dict[str, Any]], like: Any) -> list[tuple[Any, ...]]:
    """The fields that the model has, in an order that does not depend on the database."""
    first = next(iter(like), None)
    if first is None:
        return [tuple(row.values()) for row in rows]
    names = [each.name for each in fields(first)]
    return sorted((tuple(row[name] for name in names) for row in rows), key=repr)
