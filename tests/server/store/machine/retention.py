"""Rules for retention: what the cleanup deletes, also if it dies in between."""

from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import precondition, rule

from server.store import reference_model as expected
from server.store.machine.base import AGES_S, PICK
from server.store.machine.checkpoints import KINDS, Checkpoints
from server.store.machine.snapshots import Snapshots
from tinkex.server.maintenance.cleanup import over_keep_last

THREE_AGES_S = st.tuples(AGES_S, AGES_S, AGES_S)


class Retention(Checkpoints, Snapshots):
    """All parts of a cleanup in turn, or related parts."""

    @rule(
        last=st.integers(1, 8),
        ages_s=THREE_AGES_S,
        keep_last=st.integers(1, 3),
        dies=st.booleans(),
    )
    def clean_up(
        self, last: int, ages_s: tuple[float, float, float], keep_last: int, dies: bool
    ) -> None:
        """All parts in turn, like the cleanup; it may die after any part."""
        if not dies:
            self.clean_up_parts(range(last), ages_s, keep_last)
            return
        self.clean_up_parts(range(last - 1), ages_s, keep_last)
        self.clean_up_and_die(last - 1, ages_s, keep_last)

    def clean_up_and_die(
        self, part: int, ages_s: tuple[float, float, float], keep_last: int
    ) -> None:
        """The process dies between deleting rows and their files, which become orphans."""
        orphans: set[str] = set()

        async def keep(keys: Sequence[str]) -> None:
            orphans.update(key for key in keys if (self.folder / key).exists())

        if part == 7:  # deleting orphans deletes no rows
            return
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.store.retention, "_remove", keep)
            self.clean_up_parts([part], ages_s, keep_last)
        self.left += [key.partition("/")[0] for key in orphans]
        self.store.close()
        self.store = self.opened()

    @rule(ages_s=THREE_AGES_S, parts=st.sampled_from([[0], [0, 1], [0, 7], [7]]))
    def clean_up_requests(self, ages_s: tuple[float, float, float], parts: list[int]) -> None:
        self.clean_up_parts(parts, ages_s, 1)

    @rule(
        ages_s=THREE_AGES_S,
        parts=st.sampled_from([[2, 4], [3, 4], [4], [4, 7]]),
        keep_last=st.integers(1, 3),
        dies=st.booleans(),
    )
    def clean_up_checkpoints(
        self, ages_s: tuple[float, float, float], parts: list[int], keep_last: int, dies: bool
    ) -> None:
        if dies:
            self.clean_up_and_die(4, ages_s, keep_last)
        self.clean_up_parts(parts, ages_s, keep_last)

    @rule(ages_s=THREE_AGES_S, parts=st.sampled_from([[5], [6], [6, 7]]))
    def clean_up_snapshots(self, ages_s: tuple[float, float, float], parts: list[int]) -> None:
        self.clean_up_parts(parts, ages_s, 1)

    def clean_up_parts(
        self, parts: Sequence[int], ages_s: tuple[float, float, float], keep_last: int
    ) -> None:
        for part in parts:
            (
                lambda: self.drop_results(*ages_s),
                lambda: self.drop_events(ages_s[0]),
                lambda: self.drop_expired_names(),
                lambda: self.keep_last_names(keep_last),
                lambda: self.drop_versions(ages_s[2]),
                lambda: self.drop_snapshots(*ages_s[1:]),
                lambda: self.drop_older_snapshots(ages_s[0]),
                lambda: self.delete_orphans(),
            )[part]()

    @precondition(lambda self: self.world.names)
    @rule(number=PICK, keep_last=st.integers(0, 2))
    def save_while_names_are_dropped(self, number: int, keep_last: int) -> None:
        """A name that was to be deleted but was overwritten meanwhile stays."""
        named = self.pick(list(self.world.names.values()), number)
        models = list(self.world.models)

        def meanwhile() -> None:
            index = models.index(named.model_id)
            self.save_checkpoint(index, named.kind, named.name, 0.0, True, None, None)

        self.keep_last_names(keep_last, meanwhile)

    def keep_last_names(self, keep_last: int, meanwhile: Callable[[], None] | None = None) -> None:
        candidates = self.run(self.store.retention.names_over_limit(keep_last=keep_last))
        to_delete = self.names_over_keep_last(keep_last)
        if meanwhile is not None:
            meanwhile()
        now_s = self.later()
        self.run(self.store.retention.drop_names(over_keep_last(candidates, keep_last=keep_last)))
        there = {id(one) for one in self.world.names.values()}
        self.world.drop_names([one for one in to_delete if id(one) in there], now_s)

    def names_over_keep_last(self, keep_last: int) -> list[expected.Named]:
        found = []
        for model_id in self.world.models:
            for kind in KINDS:
                of_kind = [
                    one
                    for one in self.world.names.values()
                    if (one.model_id, one.kind) == (model_id, kind)
                ]
                of_kind.sort(key=lambda one: -one.saved_s)
                found += [one for one in of_kind[keep_last:] if not one.public]
        return found

    def drop_versions(self, age_s: float) -> None:
        now_s = self.later()
        self.run(self.store.retention.drop_versions(abandoned_before_s=now_s - age_s))
        for version in self.world.versions.values():
            if version.discarded_s is None and not self.world.in_use(version, now_s - age_s):
                version.discarded_s = now_s

    def drop_results(self, fetched_s: float, unfetched_s: float, abandoned_s: float) -> None:
        now_s = self.later()
        bounds = {
            "fetched_before_s": now_s - fetched_s,
            "unfetched_before_s": now_s - unfetched_s,
            "abandoned_before_s": now_s - abandoned_s,
        }
        before = set(self.world.requests)
        dropped = self.run(self.store.retention.drop_results(**bounds))
        assert set(dropped) == self.world.drop_results(**bounds)
        self.gone |= before - set(self.world.requests)

    def drop_events(self, age_s: float) -> None:
        before_s = self.later() - age_s
        self.run(
            self.store.retention.drop_events(
                completions_before_s=before_s, telemetry_before_s=before_s, audit_before_s=before_s
            )
        )
        self.world.events = {
            position: one for position, one in self.world.events.items() if one.at_s >= before_s
        }
        self.world.audit = [one for one in self.world.audit if one[0] >= before_s]

    def delete_orphans(self) -> None:
        deleted = self.run(self.store.retention.delete_orphans(before_s=float("inf")))
        assert deleted == len(self.orphans) + len(self.left)
        self.orphans, self.left = set(), []
