"""Hugging Face transformers: the KV of token prefixes, saved to a store and restored into a cache.

    prefix = PrefixCache(store, model)
    done = prefix.prefill(input_ids)                # what is stored is restored, the rest computed,
    model.generate(input_ids, cache=done.cache)     # ... and stored

or step by step:

    cache, restored = prefix.restore(input_ids)
    output = model(input_ids[:, restored:], cache=cache)
    prefix.save(cache, input_ids)

Invariants
 - a restored cache holds, bit for bit, what save() was given for the same tokens after the same
   ones before them; a block that can't be read whole ends the restored prefix, or, where the layers
   arrive while the model computes, raises PrefixLostError before anything is computed from it;
 - tensors of the cache are read and written in place: no copy of them is made in host memory;
 - caches that are not keys and values of every token (linear attention, quantised caches, latents)
   and models spread over several devices are refused with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from flashkv.connectors.engines import engine_imports
from flashkv.errors import BatchResult, BusyError, GeometryError, MemoryViewError

with engine_imports("transformers"):
    import torch

from flashkv.connectors.transformers_layers import (
    Arrivals,
    PrefixLostError,
    UnsupportedModelError,
    check_layers,
    new_cache,
    patiently,
)
from flashkv.connectors.transformers_model import (
    checkpoint_identity,
    kv_geometry,
    model_identity,
    text_config,
)
from flashkv.connectors.transformers_rows import (
    BLOCK_TOKENS,
    Chains,
    Row,
    read_options,
    regions,
    rows_of,
)
from flashkv.store import Store

if TYPE_CHECKING:
    from flashkv.client import Client
    from flashkv.leases import Lease
    from flashkv.namespace import Namespace
    from flashkv.tickets import Ticket

__all__ = [
    "BLOCK_TOKENS",
    "Prefill",
    "PrefixCache",
    "PrefixLostError",
    "SaveReport",
    "UnsupportedModelError",
    "kv_geometry",
]

LEASE_MS: Final = 30_000
"""How long matched blocks are held for the read that follows at once."""


@dataclass(frozen=True)
class SaveReport:
    """What became of the blocks of one save().

    blocks         whole blocks of the tokens given, those of all rows together.
    stored         new ones, now in the store.
    present        stored already, skipped.
    failed         neither: no space, too large, I/O error.
    offered_bytes  KV bytes of all `blocks`.
    """

    blocks: int
    stored: int
    present: int
    failed: int
    offered_bytes: int

    @property
    def tokens(self) -> int:
        return self.blocks * BLOCK_TOKENS


class Prefill(NamedTuple):
    """output: the model's; cache: holds all tokens; restored: columns that came from the store."""

    output: Any
    cache: Any
    restored: int
    saved: SaveReport


class PrefixCache:
    """Saves and restores the KV of token prefixes of one model through one store.

    store                open, with the geometry kv_geometry(model, kv_dtype).
    model                a causal language model of transformers with softmax attention in every
                         layer: full, sliding-window or chunked.
    salt                 separates prefixes that must not meet, for instance those of two tenants.
    name, revision,
    weights_fingerprint,
    adapter              see Identity; what is not given is taken from the model as it is now.
    kv_dtype             torch dtype of the cache; None: the model's.
    checkpoint           folder that the model was loaded from: the identity is then taken from its
                         files, as the connectors of other engines take it, so that they load what
                         is stored here, and the other way round. Samples of the weights in memory
                         must be those of the files.

    Raises UnsupportedModelError, IdentityError, GeometryError. Not thread-safe; the store may be
    shared.
    """

    def __init__(
        self,
        store: Store,
        model: Any,
        *,
        salt: bytes = b"",
        name: str = "",
        revision: str = "",
        weights_fingerprint: str = "",
        adapter: str = "",
        kv_dtype: Any = None,
        checkpoint: str | Path | None = None,
    ) -> None:
        self.geometry = kv_geometry(model, kv_dtype)
        if store.geometry != self.geometry:
            raise GeometryError(
                "the store holds KV of another shape or dtype than the model's",
                value=store.geometry.to_json().decode(),
                limit=self.geometry.to_json().decode(),
                advice="Open a store with geometry=kv_geometry(model)",
            )
        self._model = model
        self._config = text_config(model)
        self._device = _single_device(model)
        self._kv_dtype = model.dtype if kv_dtype is None else kv_dtype
        self._rounded = self._kv_dtype != model.dtype
        self._store = store
        self._tickets: Client | None = None
        self.new_cache()  # refuses models with layers of other kinds
        if checkpoint is None:
            identity = model_identity(
                model,
                self.geometry,
                name=name,
                revision=revision,
                weights_fingerprint=weights_fingerprint,
                adapter=adapter,
            )
        else:
            identity = checkpoint_identity(model, self.geometry, checkpoint, adapter=adapter)
        self.namespace: Namespace = store.namespace(identity)
        self._chains = Chains(self.namespace, salt)

    def new_cache(self) -> Any:
        """An empty DynamicCache of the kind that save() takes."""
        return new_cache(self._config, self._kv_dtype if self._rounded else None)

    # ---- restoring ----

    def restore(
        self, input_ids: Any, attention_mask: Any = None, *, wait: bool = True
    ) -> tuple[Any, int]:
        """A cache with the longest stored prefix of the tokens, and how many columns it holds.

        input_ids: int[tokens] or int[batch, tokens], padded on the left as attention_mask says. Of
        a batch every row is restored up to the same column; padding is zeros. At least the last
        column is left for the model to compute, since its logits are not stored. Without a hit the
        cache is empty.
        wait: False: returns while the layers are still being read; whoever looks at a layer waits
        for it, and gets PrefixLostError where it can't be had.
        """
        return self._restore(rows_of(input_ids, attention_mask), wait=wait)

    def _restore(self, rows: Sequence[Row], *, wait: bool) -> tuple[Any, int]:
        leases: list[Lease] = []
        try:
            columns = self._match(rows, leases)
            if not columns:
                return self.new_cache(), 0
            if not wait:
                with suppress(BusyError):  # others load too much at once: then as if it waited
                    return self._arriving(rows, columns, leases), columns
            return self._read(rows, columns)
        finally:
            if wait:
                for lease in leases:
                    lease.release()

    def _match(self, rows: Sequence[Row], leases: list[Lease]) -> int:
        """Columns that can be restored in every row; the blocks are held by leases."""
        last = max(row.end_column for row in rows) - 1
        columns = last
        for row in rows:
            blocks = max(0, row.ids.size - 1) // BLOCK_TOKENS
            count = 0
            if blocks and row.first_column < columns:
                match = self.namespace.match(self._chains.keys(row, blocks), lease_ms=LEASE_MS)
                count = match.count
                if match.lease is not None:
                    leases.append(match.lease)
            columns = min(columns, row.first_column + count * BLOCK_TOKENS)
        return columns if any(row.first_column < columns for row in rows) else 0

    def _new_tensors(self, rows: Sequence[Row], columns: int) -> list[Any]:
        """K and V of each layer in turn, the padding zero: masked, it must still be numbers."""
        plane = self.geometry.groups[0].planes[0]
        shape = (len(rows), plane.heads, columns, plane.elements)
        tensors = [
            torch.empty(shape, dtype=self._kv_dtype, device=self._device)
            for _ in range(2 * plane.layers)
        ]
        for row in rows:
            for tensor in tensors if row.first_column else ():
                tensor[row.number, :, : row.first_column].zero_()
        return tensors

    def _read(self, rows: Sequence[Row], columns: int) -> tuple[Any, int]:
        """A cache that is whole up to the column that is returned."""
        tensors = self._new_tensors(rows, columns)
        for span in self._chains.until(rows, columns):
            result = self.namespace.get(span.keys, regions(tensors, span), **read_options(span))
            if not result.all_ok:
                end = span.first_column + int(np.argmin(result.ok)) * BLOCK_TOKENS
                columns = min(columns, end)
        cache = self.new_cache()
        if not any(row.first_column < columns for row in rows):
            return cache, 0
        for layer, keys, values in zip(cache.layers, tensors[0::2], tensors[1::2], strict=True):
            layer.expect(keys[:, :, :columns], values[:, :, :columns])
        return cache, columns

    def _arriving(self, rows: Sequence[Row], columns: int, leases: Sequence[Lease]) -> Any:
        """A cache whose layers are being read, in the order in which the model needs them."""
        tensors = self._new_tensors(rows, columns)
        spans = self._chains.until(rows, columns)
        client = self._client()

        begun: list[Ticket] = []

        def submit(layers: range) -> list[Ticket]:
            part = tensors[2 * layers.start : 2 * layers.stop]
            for span in spans:
                get = partial(
                    client.submit_get,
                    self.namespace,
                    span.keys,
                    regions(part, span),
                    layers=list(layers),
                    **read_options(span),
                )
                begun.append(patiently(get, begun))
            return begun[-len(spans) :]

        cache = self.new_cache()
        arrivals = Arrivals(client, len(cache.layers), leases, submit)
        for number, layer in enumerate(cache.layers):
            keys, values = tensors[2 * number : 2 * number + 2]
            layer.expect(keys, values, lambda number=number: arrivals.wait(number))
        return cache

    # ---- computing ----

    def prefill(self, input_ids: Any, attention_mask: Any = None, **options: Any) -> Prefill:
        """Restores what is stored of the prompt, computes the rest, and stores it.

        Layers are read while the model computes those before them, and stored while it goes on
        after its last one. What is lost on the way is computed. options: of the model's forward,
        for instance logits_to_keep. A row's positions count its own tokens, without padding.
        """
        rows = rows_of(input_ids, attention_mask)
        ids = torch.as_tensor(input_ids, device=self._device)
        ids = ids[None] if ids.ndim == 1 else ids
        first = torch.tensor([[row.first_column] for row in rows], device=self._device)
        positions = torch.arange(ids.shape[1], device=self._device)[None] - first
        inputs = {"position_ids": positions.clamp(min=0)}
        mask = None if attention_mask is None else (positions >= 0).to(torch.long)
        cache, restored = self._restore(rows, wait=False)
        try:
            return self._compute(ids, mask, inputs, rows, cache, restored, options)
        except PrefixLostError:
            return self._compute(ids, mask, inputs, rows, self.new_cache(), 0, options)

    def _compute(
        self,
        ids: Any,
        mask: Any,
        inputs: Mapping[str, Any],
        rows: Sequence[Row],
        cache: Any,
        restored: int,
        options: Mapping[str, Any],
    ) -> Prefill:
        puts: list[Ticket] = []
        client = self._client()
        last = cache.layers[-1]

        def store() -> None:
            tensors = self._checked_tensors(cache)
            for span in self._chains.whole(rows, ids.shape[1], restored):
                put = partial(client.submit_put, self.namespace, **self._chains.put(tensors, span))
                with suppress(BusyError):  # others store too much at once: this isn't kept
                    puts.append(patiently(put, puts))

        last.after_update = store
        try:
            output = self._model(
                input_ids=ids[:, restored:],
                attention_mask=mask,
                cache=cache,
                use_cache=True,
                **{name: value[:, restored:] for name, value in inputs.items()},
                **options,
            )
        finally:
            last.after_update = None
            for ticket in puts:
                ticket.wait()
            client.drain()
        for ticket in puts:
            if ticket.error is not None:
                raise ticket.error
        return Prefill(output, cache, restored, self._report([ticket.result for ticket in puts]))

    # ---- saving ----

    def save(self, cache: Any, input_ids: Any, attention_mask: Any = None) -> SaveReport:
        """Stores the whole blocks of the tokens whose KV the cache holds.

        input_ids, attention_mask: as for restore(): the tokens that the cache was filled with, from
        the first on; fewer store a shorter prefix. Their positions must count a row's own tokens.
        Blocks that are stored already are skipped. Returns when the tensors are free to change;
        store.flush() makes it durable.
        """
        rows = rows_of(input_ids, attention_mask)
        tensors = self._checked_tensors(cache)
        if not tensors:
            return self._report([])
        batch, _, columns, _ = tensors[0].shape
        if batch != len(rows):
            raise MemoryViewError(
                "the cache has another number of rows than input_ids", value=batch, limit=len(rows)
            )
        spans = self._chains.whole(rows, int(columns), 0)
        return self._report(
            [self.namespace.put(**self._chains.put(tensors, span)) for span in spans]
        )

    def _report(self, results: Sequence[BatchResult]) -> SaveReport:
        blocks = sum(len(result) for result in results)
        present = sum(int(result.counts().get("PRESENT", 0)) for result in results)
        stored = sum(int(np.count_nonzero(result.ok)) for result in results) - present
        return SaveReport(
            blocks=blocks,
            stored=stored,
            present=present,
            failed=blocks - stored - present,
            offered_bytes=self.geometry.block_bytes(0, BLOCK_TOKENS) * blocks,
        )

    def _client(self) -> Client:
        if self._tickets is None:
            self._tickets = self._store.client()
        return self._tickets

    def _checked_tensors(self, cache: Any) -> list[Any]:
        """K and V of each layer in turn; an empty list where nothing was computed yet."""
        check_layers(cache, plain=not self._rounded)
        plane = self.geometry.groups[0].planes[0]
        if len(cache.layers) != plane.layers:
            raise MemoryViewError(
                "the cache has another number of layers than the model",
                value=len(cache.layers),
                limit=plane.layers,
            )
        if cache.get_seq_length() == 0:
            return []
        tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        batch, _, tokens, _ = tensors[0].shape
        expected = (batch, plane.heads, tokens, plane.elements)
        for tensor in tensors:
            if tuple(tensor.shape) != expected or tensor.dtype != self._kv_dtype:
                raise MemoryViewError(
                    "a tensor of the cache has the wrong shape or dtype",
                    value=f"{tensor.dtype}{list(tensor.shape)}",
                    limit=f"{self._kv_dtype}{list(expected)}",
                )
        return tensors


def _single_device(model: Any) -> Any:
    devices = {str(device) for device in getattr(model, "hf_device_map", {}).values()}
    if len(devices) > 1:
        raise UnsupportedModelError(
            "the model's layers lie on several devices", value=", ".join(sorted(devices)), limit=1
        )
    return model.device
