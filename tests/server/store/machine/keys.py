"""Rules for API keys."""

import hypothesis.strategies as st
from hypothesis.stateful import rule

from server.store import reference_model as expected
from server.store.machine.base import OWNERS, PICK, Base


class Keys(Base):
    """Keys are created, used and revoked; some expire."""

    @rule(owner=OWNERS, number=PICK, act=st.sampled_from(["create", "use", "revoke"]))
    def use_keys(self, owner: str, number: int, act: str) -> None:
        if act == "create" or not self.world.keys:
            self.create_key(owner, [None, 500.0][number % 2])
        else:
            self.use_key(number, revoke=act == "revoke")

    def create_key(self, owner: str, ttl_s: float | None) -> None:
        now_s = self.later()
        expires_s = None if ttl_s is None else now_s + ttl_s
        key, secret = self.run(self.store.keys.create(owner=owner, name="n", expires_s=expires_s))
        assert key.key_id > max(self.world.keys, default=0)
        self.secrets[key.key_id] = secret
        self.world.keys[key.key_id] = expected.Key(
            key_id=key.key_id, owner=owner, name="n", created_s=now_s, expires_s=expires_s
        )
        self.world.audit.append((now_s, "key.created"))

    def use_key(self, number: int, revoke: bool) -> None:
        key = self.pick(list(self.world.keys.values()), number)
        for _ in range(2 if revoke else 0):  # the first time counts
            now_s = self.later()
            self.run(self.store.keys.revoke(key.key_id))
            if key.revoked_s is None:
                key.revoked_s = now_s
                self.world.audit.append((now_s, "key.revoked"))
        now_s = self.later()
        found = self.run(self.store.keys.by_secret(self.secrets[key.key_id]))
        assert found is not None
        expired = key.expires_s is not None and key.expires_s <= now_s
        state = "expired" if expired else "active"
        assert found.state(now_s) == ("revoked" if key.revoked_s is not None else state)
        assert self.run(self.store.keys.by_secret("tml-nobody")) is None
        self.store.keys.mark_used(key.key_id)
        key.used_s = now_s
        self.flush()
