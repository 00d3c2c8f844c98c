"""Registry: the namespaces of a handle, and what the log says of them and of profiles.

Invariants
  - an identity and shard have one Namespace a handle, and a digest one number for the index;
  - a namespace is in the log before its first record, but where the log can't take it: segments
    describe themselves.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from flashkv import checks, limits, opening
from flashkv.errors import BusyError, IdentityError, StoreError
from flashkv.folder import reserve_of
from flashkv.identity import WHOLE, Identity, Shard
from flashkv.namespace import Namespace
from flashkv.profiles import Profile

if TYPE_CHECKING:
    from flashkv.store import Store


class Registry:
    """Namespaces of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._namespaces: dict[tuple[bytes, bytes], Namespace] = {}
        self.ids: dict[bytes, int] = {}
        """Numbers of namespaces in the index, by digest."""

    def namespace(self, identity: Identity, shard: Shard | None) -> Namespace:
        """See Store.namespace."""
        store = self._store
        if not isinstance(identity, Identity):
            raise IdentityError("namespace() needs an Identity", value=type(identity).__name__)
        whole = identity.with_geometry(store.geometry)
        assert whole.geometry is not None
        shard = WHOLE if shard is None else shard
        checks.instance(IdentityError, "shard", shard, Shard)
        part = shard.normalized(whole.geometry)
        digest = whole.digest()
        with store.writer_lock:
            name = (digest, part.encode())
            if name not in self._namespaces:
                if len(self._namespaces) >= limits.NAMESPACES_MAX:
                    raise BusyError(
                        "too many namespaces in one handle",
                        value=len(self._namespaces),
                        limit=limits.NAMESPACES_MAX,
                        advice="open the store again, or keep what varies by request in the keys",
                    )
                number = self.ids.setdefault(digest, len(self.ids))
                self._namespaces[name] = Namespace(store, whole, part, number, digest)
            return self._namespaces[name]

    def register(
        self, digest: bytes, identity_json: bytes, profile_digest: bytes | None = None
    ) -> None:
        """Logs a namespace before its first record. Under the writer's lock.

        A log that can't be written now, or has no room for more, goes without: segments describe
        themselves.
        """
        store = self._store
        state = store.manifest.state
        room = reserve_of(store.capacity_bytes) // limits.NAMESPACE_TEXT_SHARE
        self._register_profile(profile_digest, room)
        if digest in state.namespaces:
            return
        if len(identity_json) + state.namespace_bytes() > room:
            opening.forget_namespaces(state, store.index, self.ids)
            if len(identity_json) + state.namespace_bytes() > room:
                return
        with suppress(StoreError):
            store.manifest.namespace_added(digest, identity_json)

    def _register_profile(self, digest: bytes | None, room: int) -> None:
        """Logs the profile that records are to name."""
        profile = self._store.options.profile
        if digest is not None and isinstance(profile, Profile):
            with suppress(StoreError):
                self._store.manifest.profile_used(digest, profile.json, room)

    def profiles(self) -> dict[bytes, dict[str, Any]]:
        """See Store.profiles."""
        store = self._store
        with store.writer_lock:
            state = store.manifest_state if store.read_only else store.manifest.state
            profiles = dict(state.profiles)
        return {digest: Profile.load(text).plain for digest, text in profiles.items()}

    def retire(self, digest: bytes) -> int:
        """See Namespace.rotate."""
        store = self._store
        with store.gate, store.writer_lock:
            store.check_writable()
            dropped = store.index.drop_namespace(self.ids[digest])
            store.manifest.namespace_retired(digest, store.writer.next_sequence - 1)
            return dropped
