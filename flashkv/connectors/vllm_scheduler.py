"""The scheduler's half of the vLLM connector: which tokens are stored, what to load and to save.

Invariants
  - a prompt's last token is never loaded: vLLM must compute it to have something to sample from;
  - a granule is saved once its tokens are part of the request and computed: drafts that were not
    accepted are no part of it;
  - what was found is leased until it is loaded, or the request ends;
  - a request whose load failed is not offered the store again: it can't fail for ever;
  - what no key describes (embeddings as prompt, sessions whose tokens change) is neither loaded
    nor saved.
"""

from __future__ import annotations

import hashlib
import logging
import struct
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from flashkv.connectors.checkpoint import canonical
from flashkv.connectors.vllm_model import PagedLayout
from flashkv.connectors.vllm_plan import Heard, Load, Plan, Save, block_span
from flashkv.errors import FlashKVError
from flashkv.identity import KEY_BYTES, token_keys, weights_fingerprint
from flashkv.leases import Lease
from flashkv.namespace import Namespace
from flashkv.store import Store

log = logging.getLogger(__name__)

LEASE_MS: Final = 30_000
"""How long what was found is held for a load that vLLM has yet to schedule."""
NO_KEYS: Final = np.empty((0, KEY_BYTES), np.uint8)


class Lookup(Protocol):
    """Where the scheduler asks what is stored."""

    digest: bytes

    def match(self, keys: NDArray[np.uint8]) -> tuple[int, Lease | None]:
        """How many leading keys are stored, and what holds them."""

    def hear(self, heard: Heard) -> None:
        """Takes in what workers tell."""

    def forget(self) -> bool:
        """Retires all that is stored. False: workers must, and nothing old is found any more."""


class StoreLookup:
    """Lookup in the store of this process, which the worker shares."""

    def __init__(self, store: Store, namespace: Namespace) -> None:
        self._store = store
        self._namespace = namespace
        self.digest = namespace.digest

    def match(self, keys: NDArray[np.uint8]) -> tuple[int, Lease | None]:
        found = self._namespace.match(keys, lease_ms=LEASE_MS)
        return found.count, found.lease

    def hear(self, heard: Heard) -> None:
        """The worker has changed the same index."""

    def forget(self) -> bool:
        retire(self._store, self._namespace)
        return True


@dataclass
class Tracked:
    """A request as far as the store is concerned.

    keys    of its whole granules, as far as they were asked for.
    saved   leading granules that are stored, or handed over to be.
    found   what the last lookup found and vLLM has not yet allocated: (first token, end token).
    """

    request: Any
    salt: bytes
    usable: bool
    keys: NDArray[np.uint8] = field(default_factory=lambda: NO_KEYS)
    saved: int = 0
    found: tuple[int, int] | None = None
    lease: Lease | None = None
    failed: bool = False

    def drop_lease(self) -> None:
        if self.lease is not None:
            self.lease.release()
            self.lease = None


class SchedulerSide:
    """See the module. Called by vLLM's scheduler thread alone."""

    def __init__(
        self,
        lookup: Lookup,
        layout: PagedLayout,
        *,
        salt: str,
        between: bool,
        loads: bool = True,
        saves: bool = True,
    ) -> None:
        """between: loads run between steps, and their requests wait for them."""
        self.counts: Counter[str] = Counter()
        self._lookup = lookup
        self._granule = layout.granule
        self._block_tokens = layout.block_tokens
        self._salt = salt
        self._between = between
        self._may_load, self._may_save = loads, saves
        self._workers_forget = False
        self._tracked: dict[str, Tracked] = {}
        self._loads: list[Load] = []
        self._loading: dict[str, Load] = {}  # what was handed over and hasn't come back

    # ---- what vLLM asks ----

    def on_new_request(self, request: Any) -> None:
        """A request begins."""
        usable = request.prompt_embeds is None and not request.resumable
        salt = salt_of(self._salt, request.cache_salt)
        self._tracked[request.request_id] = Tracked(request, salt, usable)

    def match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """(tokens beyond `computed` that can be loaded, whether between steps).

        None: another request is loading them; ask again.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not self._may_load:
            return 0, False
        tracked.drop_lease()
        tracked.found = None
        first = computed // self._granule
        end = (request.num_tokens - 1) // self._granule
        offset = computed % self._granule
        if (
            not tracked.usable
            or tracked.failed
            or request.skip_reading_prefix_cache
            or end <= first
            or offset % min(self._block_tokens, self._granule)
        ):
            return 0, False
        keys = self._keys(tracked, end)[first:end]
        if self._between and self._is_loading(keys[0]):
            return None, False
        self.counts["lookups"] += 1
        count, tracked.lease = self._lookup.match(keys)
        if count == 0:
            return 0, False
        tracked.found = (computed, (first + count) * self._granule)
        return tracked.found[1] - computed, self._between

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """vLLM has allocated the blocks of a request, `external` tokens of which are to be loaded.

        blocks: its block ids from the first on.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or external <= 0 or tracked.found is None:
            return
        computed, most = tracked.found
        tracked.found = None
        end = computed + external
        assert end <= most
        first, last = computed // self._granule, -(-end // self._granule)
        span = block_span(first * self._granule, last * self._granule, self._block_tokens)
        load = Load(
            request_id=request.request_id,
            keys=tracked.keys[first:last],
            first_token=computed,
            start_token=first * self._granule,
            blocks=np.asarray(blocks[span], np.int64),
            between=self._between,
        )
        self._loads.append(load)
        self._loading[request.request_id] = load
        if tracked.saved >= first:
            tracked.saved = max(tracked.saved, end // self._granule)
        self.counts["load_tokens"] += external

    def _is_loading(self, key: NDArray[np.uint8]) -> bool:
        return any((load.keys == key).all(axis=1).any() for load in self._loading.values())

    def plan(self, output: Any) -> Plan:
        """What the worker does in this step. output: vLLM's SchedulerOutput."""
        plan = Plan(loads=self._loads, idle=not output.total_num_scheduled_tokens)
        plan.forget, self._workers_forget = self._workers_forget, False
        plan.released = {*output.finished_req_ids, *(output.preempted_req_ids or ())}
        self._loads = []
        if not self._may_save:
            return plan
        for request_id, count in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None or not tracked.usable:
                continue
            request = tracked.request
            # Drafts lie beyond num_tokens until they are accepted.
            whole = min(request.num_computed_tokens + count, request.num_tokens) // self._granule
            if whole > tracked.saved:
                (blocks,) = output.kv_connector_block_state.resolve_block_ids(request_id)
                plan.saves.append(self._save(tracked, whole, blocks, spoilable=bool(plan.loads)))
        return plan

    def _save(self, tracked: Tracked, whole: int, blocks: Any, *, spoilable: bool) -> Save:
        keys = self._keys(tracked, whole)
        first, tracked.saved = tracked.saved, whole
        start, end = first * self._granule, whole * self._granule
        span = block_span(start, end, self._block_tokens)
        return Save(
            request_id=tracked.request.request_id,
            keys=keys[first:whole],
            parent=keys[first - 1].tobytes() if first else b"",
            start_token=start,
            blocks=np.asarray(blocks[span], np.int64),
            rests_on=np.asarray(blocks[: span.stop], np.int64) if spoilable else None,
        )

    def heard(self, finished: set[str], failed_blocks: set[int], heard: Heard | None) -> None:
        """A step's output has come back.

        finished: requests whose loads between steps are over. failed_blocks: of any load.
        """
        if heard is not None:
            self._lookup.hear(heard)
        if failed_blocks:
            self.counts["failed_blocks"] += len(failed_blocks)
            for tracked in self._tracked.values():
                tracked.saved = 0  # what rested on the failed blocks was not saved
            for request_id, load in self._loading.items():
                if not failed_blocks.isdisjoint(load.blocks.tolist()):
                    self._tracked[request_id].failed = True
        for request_id in finished if self._between else list(self._loading):
            if self._loading.pop(request_id, None) is not None:
                self._tracked[request_id].drop_lease()

    def request_ids(self) -> list[str]:
        """All requests that vLLM has and that were not finished."""
        return list(self._tracked)

    @property
    def loading(self) -> bool:
        """Whether loads were handed over that haven't come back."""
        return bool(self._loading)

    def forget(self) -> bool:
        """Retires all that is stored of the model."""
        for tracked in self._tracked.values():
            tracked.saved = 0
        try:
            self._workers_forget |= not self._lookup.forget()
        except FlashKVError as error:
            log.error("what flashkv stored of the model could not be retired: %s", error)
            return False
        return True

    def finished(self, request_id: str) -> None:
        """A request is over, or was aborted."""
        tracked = self._tracked.pop(request_id, None)
        if tracked is not None:
            tracked.drop_lease()
        self._loading.pop(request_id, None)

    def close(self) -> None:
        """Gives all leases back."""
        for request_id in list(self._tracked):
            self.finished(request_id)

    # ---- keys ----

    def _keys(self, tracked: Tracked, count: int) -> NDArray[np.uint8]:
        """Keys of the first `count` granules; those that are known are not made again."""
        known = len(tracked.keys)
        if known < count:
            whole = tracked.request.num_tokens // self._granule
            ids = np.asarray(
                tracked.request.all_token_ids[known * self._granule : whole * self._granule],
                np.int64,
            )
            parent = tracked.keys[-1].tobytes() if known else b""
            extras = [self._extra(tracked.request, granule) for granule in range(known, whole)]
            keys = chain(self._lookup.digest, ids, self._granule, tracked.salt, extras, parent)
            tracked.keys = np.concatenate([tracked.keys, keys])
        return tracked.keys

    def _extra(self, request: Any, granule: int) -> bytes:
        """What besides its tokens and those before it makes a granule's KV what it is."""
        start = granule * self._granule
        words: list[Any] = []
        if request.lora_request is not None:
            lora = request.lora_request
            words.append(["lora", lora.lora_name, adapter_fingerprint(lora.lora_path)])
        for feature in request.mm_features:
            place = feature.mm_position
            if place.offset < start + self._granule and place.offset + place.length > start:
                words.append(["mm", feature.identifier, place.offset - start])
        return canonical(words).encode() if words else b""


def retire(store: Store, namespace: Namespace) -> None:
    """Retires what is stored, and what is on its way. Raises StoreError, BusyError."""
    with store.client() as client:  # the write lane keeps the order
        client.submit_delete(namespace, NO_KEYS).wait()
    namespace.rotate()


def chain(
    digest: bytes,
    ids: NDArray[np.int64],
    granule: int,
    salt: bytes,
    extras: list[bytes],
    parent: bytes,
) -> NDArray[np.uint8]:
    """Keys of whole granules that may differ in their extras, in as few calls as there are runs."""
    parts = []
    first = 0
    while first < len(extras):
        end = first + 1
        while end < len(extras) and extras[end] == extras[first]:
            end += 1
        run = ids[first * granule : end * granule]
        keys = token_keys(digest, run, granule, salt, extras[first], parent)
        parent = keys[-1].tobytes()
        parts.append(keys)
        first = end
    return np.concatenate(parts) if parts else NO_KEYS


def salt_of(setting: str, cache_salt: str | None) -> bytes:
    """The salt of a request's chain. Of one alone its text, so that other engines' match; of two
    a digest, so that no request can name the pair."""
    if not setting or not cache_salt:
        return (setting or cache_salt or "").encode()
    parts = [text.encode() for text in (setting, cache_salt)]
    sized = b"".join(struct.pack("<I", len(part)) + part for part in parts)
    return hashlib.sha256(b"flashkv salts 0\0" + sized).digest()


def adapter_fingerprint(path: str) -> str:
    """What tells an adapter from others: a digest of its settings and weights.

    Of a folder that is not here, or holds no weights that can be read, its path.
    """
    try:
        files = sorted(item for item in Path(path).iterdir() if item.is_file())
        stamp = tuple((item.name, item.stat().st_mtime_ns, item.stat().st_size) for item in files)
        return _adapter_fingerprint(path, stamp)
    except (FlashKVError, OSError):
        return path


@lru_cache(maxsize=1024)
def _adapter_fingerprint(path: str, stamp: tuple[tuple[str, int, int], ...]) -> str:
    """stamp: names, times and sizes of the files; an adapter may be replaced in place."""
    sha = hashlib.sha256(weights_fingerprint(path).encode())
    for name, _, _ in stamp:
        if name.endswith(".json"):
            sha.update(name.encode() + b"\0" + (Path(path) / name).read_bytes())
    return sha.hexdigest()
