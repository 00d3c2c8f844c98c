"""Hugging Face transformers: the KV of token prefixes, saved to a store and restored into a cache.

    prefix = PrefixCache(store, model)
    cache, restored_tokens = prefix.restore(input_ids)
    output = model(input_ids[:, restored_tokens:], cache=cache)
    prefix.save(cache, input_ids)

Invariants
 - a restored cache holds, bit for bit, what save() was given for the same tokens after the same
   ones before them; a block that can't be read whole ends the restored prefix;
 - tensors of the cache are read and written in place: no copy of them is made in host memory;
 - caches that are not plain keys and values of every token (sliding windows, hybrids, quantised
   caches), batches and models spread over several devices are refused with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from flashkv.errors import GeometryError, MemoryViewError
from flashkv.geometry import MemoryView
from flashkv.memory import Regions

try:
    import torch
    from transformers.cache_utils import DynamicCache, DynamicLayer
except ImportError as error:  # pragma: no cover  (the test environment has both)
    raise ImportError(
        "flashkv.connectors.transformers needs torch and transformers:"
        f" pip install 'flashkv[transformers]' ({error})"
    ) from error

from flashkv.connectors.transformers_model import (
    UnsupportedModelError,
    kv_geometry,
    model_identity,
    text_config,
)

if TYPE_CHECKING:
    from flashkv.namespace import Namespace
from flashkv.store import Store

__all__ = ["BLOCK_TOKENS", "PrefixCache", "SaveReport", "UnsupportedModelError", "kv_geometry"]

BLOCK_TOKENS: Final = 64
"""Tokens a block: the granule of flashkv's own token chain."""
LEASE_MS: Final = 30_000
"""How long matched blocks are held for the read that follows at once."""
# Each layer's K and V is memory of its own: [kv_head, token, dim], the tokens of a block in a row.
VIEW: Final = MemoryView(
    "layer plane head token", regions=("layer", "plane"), block_tokens=BLOCK_TOKENS
)


@dataclass(frozen=True)
class SaveReport:
    """What became of the blocks of one save().

    blocks         whole blocks of the tokens given.
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


class RoundedLayer(DynamicLayer):  # type: ignore[misc]  # torch and transformers are untyped here
    """A cache layer that holds its keys and values in `kv_dtype` and computes in the model's.

    What attention sees is what the cache holds: also the newest tokens are rounded.
    """

    def __init__(self, kv_dtype: Any) -> None:
        super().__init__()
        self.kv_dtype = kv_dtype

    def update(
        self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        keys, values = super().update(
            key_states.to(self.kv_dtype), value_states.to(self.kv_dtype), *args, **kwargs
        )
        return keys.to(key_states.dtype), values.to(value_states.dtype)


class PrefixCache:
    """Saves and restores the KV of token prefixes of one model through one store.

    store                open, with the geometry kv_geometry(model, kv_dtype).
    model                a causal language model of transformers with full attention in every layer.
    salt                 separates prefixes that must not meet, for instance those of two tenants.
    name, revision,
    weights_fingerprint,
    adapter              see Identity; what is not given is taken from the model as it is now.
    kv_dtype             torch dtype of the cache; None: the model's.

    Raises UnsupportedModelError, GeometryError. Not thread-safe; the store may be shared.
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
    ) -> None:
        self.geometry = kv_geometry(model, kv_dtype)
        if store.geometry != self.geometry:
            raise GeometryError(
                "the store holds KV of another shape or dtype than the model's",
                value=store.geometry.to_json().decode(),
                limit=self.geometry.to_json().decode(),
                advice="Open a store with geometry=kv_geometry(model)",
            )
        self.salt = salt
        self._config = text_config(model)
        self._device = _single_device(model)
        self._kv_dtype = model.dtype if kv_dtype is None else kv_dtype
        self._rounded = self._kv_dtype != model.dtype
        _check_layers(DynamicCache(config=self._config), DynamicLayer)
        self.namespace: Namespace = store.namespace(
            model_identity(
                model,
                self.geometry,
                name=name,
                revision=revision,
                weights_fingerprint=weights_fingerprint,
                adapter=adapter,
            )
        )

    def new_cache(self) -> Any:
        """An empty DynamicCache of the kind that save() takes."""
        cache = DynamicCache(config=self._config)
        if self._rounded:
            cache.layers = [RoundedLayer(self._kv_dtype) for _ in cache.layers]
        return cache

    def restore(self, input_ids: Any) -> tuple[Any, int]:
        """A cache with the longest stored prefix of the tokens, and how many tokens it holds.

        input_ids: int[tokens] or int[1, tokens], without padding. At least the last token is left
        for the model to compute, since its logits are not stored. Without a hit the cache is empty.
        """
        ids = _token_ids(input_ids)
        blocks = max(0, ids.size - 1) // BLOCK_TOKENS
        cache = self.new_cache()
        if blocks == 0:
            return cache, 0
        keys = self._keys(ids[: blocks * BLOCK_TOKENS])
        match = self.namespace.match(keys, lease_ms=LEASE_MS)
        try:
            restored = self._read(cache, keys[: match.count]) if match.count else 0
        finally:
            if match.lease is not None:
                match.lease.release()
        return cache, restored * BLOCK_TOKENS

    def save(self, cache: Any, input_ids: Any) -> SaveReport:
        """Stores the whole blocks of the tokens whose KV the cache holds.

        input_ids: int[tokens] or int[1, tokens]: the tokens that the cache was filled with, from
        the first on, without padding; fewer store a shorter prefix. Blocks that are stored already
        are skipped. Returns when the tensors are free to change; store.flush() makes it durable.
        """
        ids = _token_ids(input_ids)
        tensors = self._checked_tensors(cache)
        held = int(tensors[0].shape[-2]) if tensors else 0
        blocks = min(held, ids.size) // BLOCK_TOKENS
        if blocks == 0:
            return SaveReport(0, 0, 0, 0, 0)
        keys = self._keys(ids[: blocks * BLOCK_TOKENS])
        parents = [b"", *(key.tobytes() for key in keys[:-1])]
        result = self.namespace.put(
            keys, _regions(tensors, blocks), view=VIEW, parents=parents, position=0
        )
        present = int(result.counts().get("PRESENT", 0))
        stored = int(np.count_nonzero(result.ok)) - present
        return SaveReport(
            blocks=blocks,
            stored=stored,
            present=present,
            failed=blocks - stored - present,
            offered_bytes=self.geometry.block_bytes(0, BLOCK_TOKENS) * blocks,
        )

    def _keys(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
        return self.namespace.token_keys(ids, block_tokens=BLOCK_TOKENS, salt=self.salt)

    def _read(self, cache: Any, keys: npt.NDArray[np.uint8]) -> int:
        """Reads blocks into new tensors of the cache; returns how many leading ones are whole."""
        plane = self.geometry.groups[0].planes[0]
        blocks = len(keys)
        tokens = blocks * BLOCK_TOKENS
        shape = (1, plane.heads, tokens, plane.elements)
        tensors = [
            torch.empty(shape, dtype=self._kv_dtype, device=self._device)
            for _ in range(2 * plane.layers)
        ]
        ok = self.namespace.get(keys, _regions(tensors, blocks), view=VIEW).ok
        whole = blocks if ok.all() else int(np.argmin(ok))
        if whole == 0:
            return 0
        for layer, keys_of, values_of in zip(
            cache.layers, tensors[0::2], tensors[1::2], strict=True
        ):
            layer.lazy_initialization(keys_of, values_of)
            layer.keys = keys_of[:, :, : whole * BLOCK_TOKENS]
            layer.values = values_of[:, :, : whole * BLOCK_TOKENS]
        return whole

    def _checked_tensors(self, cache: Any) -> list[Any]:
        """K and V of each layer in turn; an empty list where nothing was computed yet."""
        _check_layers(cache, RoundedLayer if self._rounded else DynamicLayer)
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
        if batch != 1:
            raise MemoryViewError(
                "one sequence at a time: the cache's batch is too large",
                value=batch,
                limit=1,
                advice="Save each row of the batch through a cache of its own",
            )
        expected = (1, plane.heads, tokens, plane.elements)
        for tensor in tensors:
            if tuple(tensor.shape) != expected or tensor.dtype != self._kv_dtype:
                raise MemoryViewError(
                    "a tensor of the cache has the wrong shape or dtype",
                    value=f"{tensor.dtype}{list(tensor.shape)}",
                    limit=f"{self._kv_dtype}{list(expected)}",
                )
        return tensors


def _regions(tensors: list[Any], blocks: int) -> Regions:
    """Each tensor [1, head, token, dim] as blocks [head, block, token, dim], in place."""
    whole = blocks * BLOCK_TOKENS
    blocked = [tensor[0, :, :whole].unflatten(1, (blocks, BLOCK_TOKENS)) for tensor in tensors]
    return Regions(blocked, row_axis=1)


def _token_ids(input_ids: Any) -> npt.NDArray[np.int32]:
    """int32[tokens]. Raises MemoryViewError for batches."""
    ids = input_ids.detach().cpu().numpy() if hasattr(input_ids, "detach") else input_ids
    array = np.asarray(ids)
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise MemoryViewError(
            "input_ids must be the ints of one sequence",
            value=f"{array.dtype}{list(array.shape)}",
            limit="[tokens] or [1, tokens]",
        )
    return array.astype(np.int32)


def _check_layers(cache: Any, wanted: type) -> None:
    """Raises where a layer of the cache is of another kind than plain keys and values."""
    for number, layer in enumerate(getattr(cache, "layers", [])):
        if type(layer) is not wanted:
            raise UnsupportedModelError(
                f"layer {number} of the cache is not full attention with a dense cache",
                value=type(layer).__name__,
                limit=wanted.__name__,
                advice="Make caches with PrefixCache.new_cache()",
            )
    if not getattr(cache, "layers", None):
        raise UnsupportedModelError("the cache has no layers", value=type(cache).__name__)


def _single_device(model: Any) -> Any:
    devices = {str(device) for device in getattr(model, "hf_device_map", {}).values()}
    if len(devices) > 1:
        raise UnsupportedModelError(
            "the model's layers lie on several devices", value=", ".join(sorted(devices)), limit=1
        )
    return model.device
