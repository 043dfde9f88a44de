"""Rules for checkpoints and their names."""

from dataclasses import fields
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import precondition, rule

from server.store import reference_model as expected
from server.store.machine.base import BASE, PICK
from server.store.machine.requests import Requests
from tinkex.server.queued_request import Kind, Outcome
from tinkex.server.store import Sampler
from tinkex.server.store.checkpoints import NameTaken, Naming, SamplerTaken

KINDS = ("weights", "sampler_weights")
NAMES = st.sampled_from(["a", "a", "b"])


class Checkpoints(Requests):
    """Checkpoints are saved, found, loaded, published and deleted; names expire."""

    @precondition(lambda self: self.world.models)
    @rule(
        number=PICK,
        kind=st.sampled_from([KINDS[0], *KINDS]),
        name=NAMES,
        after_s=st.sampled_from([0.0, 600.0]),
        overwrite=st.sampled_from([False, False, True]),
        ttl_s=st.sampled_from([None, None, 500.0]),
        sampler_number=st.sampled_from([None, None, None, 0, 1]),
    )
    def save_checkpoint(
        self,
        number: int,
        kind: str,
        name: str,
        after_s: float,
        overwrite: bool,
        ttl_s: float | None,
        sampler_number: int | None,
    ) -> None:
        """With a name or, with the number of a sampler, without one."""
        self.clock.now_s += after_s
        now_s = self.later()
        model = self.some_model(number)
        steps = [one for one in self.world.requests.values() if one.model_id == model.model_id]
        seq_id = max((one.seq_id for one in steps), default=0) + 1
        new = self.step(model, seq_id, Kind.SAVE_WEIGHTS)
        request = self.take(new, self.run(self.store.requests.accept(new)), now_s)
        version = self.store.checkpoints.new_version(
            owner=model.owner,
            model_id=model.model_id,
            kind=kind,
            name=name if sampler_number is None else None,
        ).with_size(7)
        folder = Path(self.store.checkpoints.folder(version))
        folder.mkdir(parents=True)
        (folder / "adapter").write_text(version.version_id)
        expires_s = None if ttl_s is None else now_s + ttl_s
        naming, sampler = None, None
        if sampler_number is None:
            naming = Naming(overwrite=overwrite, expires_s=expires_s, user_metadata={"m": 1})
        else:
            sampler = Sampler(
                sampling_session_id=f"{model.session_id}:sample:{sampler_number}",
                owner=model.owner,
                session_id=model.session_id,
                base_model=BASE,
                version_id=version.version_id,
                model_path=None,
            )
        key = (model.model_id, kind, name)
        known = self.world.names.get(key)
        refusal: type[Exception] | None = None
        if sampler is not None and sampler.sampling_session_id in self.world.samplers:
            refusal = SamplerTaken
        elif naming is not None and known is not None and not overwrite and known.alive(now_s):
            refusal = NameTaken
        saving = self.store.checkpoints.save(
            version,
            fingerprint=self.run(self.store.checkpoints.store_files(version)),
            request=self.queued(request),
            outcome=Outcome(result=b"saved", version_id=version.version_id),
            naming=naming,
            sampler=None
            if sampler is None or sampler_number is None
            else (sampler, sampler_number),
        )
        if refusal is not None:
            with pytest.raises(refusal):
                self.run(saving)
            self.left.append("checkpoints")
            return
        self.run(saving)
        self.world.finish(request, b"saved", None, now_s)
        request.version_id = version.version_id
        self.world.audit.append((now_s, "checkpoint.saved"))
        self.world.versions[version.version_id] = expected.Version(
            **{
                each.name: getattr(version, each.name)
                for each in fields(expected.Version)
                if each.name != "discarded_s"
            }
        )
        if sampler is not None and sampler_number is not None:
            self.world.samplers[sampler.sampling_session_id] = expected.Sampler(
                sampling_session_id=sampler.sampling_session_id,
                owner=model.owner,
                session_id=model.session_id,
                sampling_session_seq_id=sampler_number,
                version_id=version.version_id,
            )
        else:
            self.world.names[key] = expected.Named(
                model_id=model.model_id,
                kind=kind,
                name=name,
                version_id=version.version_id,
                saved_s=now_s,
                expires_s=expires_s,
            )

    def find_checkpoint(self, number: int, owner: str) -> None:
        named = self.pick(list(self.world.names.values()), number)
        path = f"tinker://{named.model_id}/{named.kind}/{named.name}"
        found = self.run(self.store.checkpoints.find(path, readers=[owner]))
        version = self.world.versions[named.version_id]
        if named.alive(self.clock.now_s) and (named.public or version.owner == owner):
            assert found is not None
            assert found.version_id == version.version_id
            folder = Path(self.run(self.store.checkpoints.open(found.version_id)))
            assert (folder / "adapter").read_text() == version.version_id
        else:
            assert found is None

    @precondition(lambda self: self.world.names)
    @rule(number=PICK, request_number=PICK)
    def load_checkpoint(self, number: int, request_number: int) -> None:
        now_s = self.later()
        named = self.pick(list(self.world.names.values()), number)
        model = self.some_model(request_number)
        new = self.step(model, 10 + number % 4, Kind.LOAD_WEIGHTS)
        request = self.take(new, self.run(self.store.requests.accept(new)), now_s)
        if request.status != "waiting" or request.kind != Kind.LOAD_WEIGHTS:
            return
        loaded = Outcome(result=b"{}", version_id=named.version_id)

        async def finish() -> None:
            await self.store.requests.finish_one(self.queued(request), loaded)

        self.run(finish())
        self.world.finish(request, b"{}", None, now_s)
        request.version_id = named.version_id

    @precondition(lambda self: self.world.names)
    @rule(
        number=PICK,
        change=st.sampled_from(["delete", "publish", "unpublish", "expire", "keep"]),
        after_s=st.sampled_from([0.0, 600.0]),
    )
    def change_name(self, number: int, change: str, after_s: float) -> None:
        """An expired name does not exist, although its row does."""
        self.clock.now_s += after_s
        now_s = self.later()
        named = self.pick(list(self.world.names.values()), number)
        of = self.store.checkpoint_catalog
        key = {"model_id": named.model_id, "kind": named.kind, "name": named.name}
        alive = named.alive(now_s)
        if change == "delete":
            assert self.run(of.delete(**key)) is alive
            if alive:
                self.world.drop_names([named], now_s)
            return
        event = "checkpoint.expiry_set"
        changed = alive
        if change in ("publish", "unpublish"):
            public = change == "publish"
            event = f"checkpoint.{change}ed"
            # Publishing a published checkpoint is not a change, and not audited.
            changed = alive and named.public is not public
            assert self.run(of.set_public(public, **key)) is alive
            named.public = public if alive else named.public
        else:
            expires_s = now_s + 2.0 if change == "expire" else None
            assert self.run(of.set_expiry(expires_s, **key)) is alive
            named.expires_s = expires_s if alive else named.expires_s
        if changed:
            self.world.audit.append((now_s, event))
        if change == "expire":
            # Deleted at the first cleanup after its expiry.
            self.clock.now_s += 2.0
            self.drop_expired_names()

    def list_checkpoints(self, owner: str) -> None:
        found, count = self.run(
            self.store.checkpoint_catalog.checkpoints(owner=owner, kinds=KINDS, published=True)
        )
        there = [
            one
            for one in self.world.names.values()
            if one.alive(self.clock.now_s)
            and (one.public or self.world.versions[one.version_id].owner == owner)
        ]
        there.sort(key=lambda one: -one.saved_s)
        assert count == len(there)
        assert [one.version.version_id for one in found] == [one.version_id for one in there]

    def drop_expired_names(self) -> None:
        now_s = self.later()
        self.run(self.store.retention.drop_expired_names(now_s=now_s))
        gone = [one for one in self.world.names.values() if not one.alive(now_s)]
        self.world.drop_names(gone, now_s)
