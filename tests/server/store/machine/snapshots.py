"""Rules for snapshots."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import precondition, rule

from server.store import reference_model as expected
from server.store.machine.base import PICK, Base
from tinkex.server.store import Damaged


class Snapshots(Base):
    """Snapshots are saved, damaged, and deleted when their models do not need them."""

    @precondition(lambda self: self.world.models)
    @rule(number=PICK, step_number=PICK, spoiled=st.sampled_from([None, "nan"]))
    def save_snapshot(self, number: int, step_number: int, spoiled: str | None) -> None:
        """After any step; it is refused while a step that it contains has no result."""
        now_s = self.later()
        model = self.some_model(number)
        steps = {
            one.seq_id for one in self.world.requests.values() if one.model_id == model.model_id
        }
        first_waiting = sorted(one.seq_id for one in self.world.waiting(model.model_id))[:1]
        # Mostly at the first waiting step, where it must be refused.
        seq_id = self.pick([*first_waiting, *sorted(steps), *first_waiting] or [0], -step_number)
        known = self.world.snapshots.get(model.model_id)
        seq_id = max(seq_id, -1 if known is None else known.seq_id)
        key, path = self.store.snapshots.new_key(model.model_id)
        folder = Path(path)
        folder.mkdir(parents=True)
        (folder / "state").write_text(key)
        snapshot = expected.Snapshot(
            model_id=model.model_id,
            seq_id=seq_id,
            place=key,
            spoiled=spoiled,
            size_bytes=5,
            created_s=now_s,
        )
        saved = self.run(
            self.store.snapshots.save(
                model_id=model.model_id, seq_id=seq_id, place=key, size_bytes=5, spoiled=spoiled
            )
        )
        assert saved is self.world.snapshot(snapshot)
        newest = self.run(self.store.snapshots.newest(model.model_id))
        if newest is not None:
            opened = Path(self.run(self.store.snapshots.open(newest)))
            assert (opened / "state").read_text() == newest.place

    def drop_snapshots(self, inactive_s: float, abandoned_s: float) -> None:
        now_s = self.later()
        behind = self.run(
            self.store.retention.models_without_snapshot(
                inactive_before_s=now_s - inactive_s,
                abandoned_before_s=now_s - abandoned_s,
                limit=1000,
            )
        )
        assert set(behind) == {
            model.model_id
            for model in self.world.models.values()
            if not self.world.ended(model.session_id, now_s - abandoned_s)
            and self.world.sessions[model.session_id].seen_s < now_s - inactive_s
            and any(one.status == "done" for one in self.log_of(model.model_id))
        }
        self.run(self.store.retention.drop_snapshots(abandoned_before_s=now_s - abandoned_s))
        self.world.drop_snapshots(now_s - abandoned_s)

    def drop_older_snapshots(self, age_s: float) -> None:
        now_s = self.later()
        self.run(self.store.retention.drop_older_snapshots(before_s=now_s - age_s))
        self.world.drop_older_snapshots(now_s - age_s)

    @precondition(lambda self: self.world.snapshots)
    @rule(number=PICK)
    def damage_snapshot(self, number: int) -> None:
        """The fallback replaces it, or Damaged is raised if there is none."""
        self.later()
        bad = self.pick(list(self.world.snapshots.values()), number)
        file = self.folder / bad.place / "state"
        text = file.read_text()
        file.write_text("damaged")
        if self.world.fall_back(bad.model_id):
            found = self.run(self.store.snapshots.newest_intact(bad.model_id))
            before = self.world.snapshots.get(bad.model_id)
            assert (found and found.place) == (before and before.place)
        else:
            with pytest.raises(Damaged, match="the steps before it were deleted"):
                self.run(self.store.snapshots.newest_intact(bad.model_id))
            file.write_text(text)

    def log_of(self, model_id: str) -> list[expected.Request]:
        snapshot = self.world.snapshots.get(model_id)
        return self.world.log(model_id, after=-1 if snapshot is None else snapshot.seq_id)
