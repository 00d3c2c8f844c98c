"""Layers of a transformers cache whose contents arrive while the model computes the layers before.

Invariants
 - whoever looks at a layer's keys or values waits until they are there, whole and checked, or gets
   PrefixLostError: nobody ever computes with memory that a read has not filled;
 - a layer's tensors are never changed in place: what was handed to the store stays as it was;
 - sliding-window layers keep the keys and values of all tokens (the mask cuts the window), so that
   a prefix of any length can be stored and restored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from flashkv.connectors.engines import engine_imports
from flashkv.errors import BusyError, FlashKVError, IdentityError

with engine_imports("transformers"):
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

if TYPE_CHECKING:
    from flashkv.client import Client
    from flashkv.leases import Lease
    from flashkv.tickets import Ticket

LAYERS_A_READ: Final = 8
"""Most layers that one read brings; the first ones come alone, since the model waits for them."""


class UnsupportedModelError(IdentityError):
    """The model's cache, or how it was loaded, is not one that this connector can store."""


class PrefixLostError(FlashKVError, RuntimeError):
    """A stored prefix could not be read whole; the model has to compute it."""


class FlashLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """A dense layer, all tokens kept, that may still be arriving.

    kv_dtype: torch dtype that it holds; attention computes in the model's. What attention sees is
    what the layer holds: also the newest tokens are rounded. None: the model's.
    """

    is_sliding = False

    def __init__(self, kv_dtype: Any = None) -> None:
        self._arrival: Callable[[], None] | None = None
        self._keys: Any = None
        self._values: Any = None
        super().__init__()
        self.kv_dtype = kv_dtype
        self.after_update: Callable[[], None] | None = None

    @property
    def keys(self) -> Any:
        """[batch, kv_head, token, dim], or None. Waits for what is arriving."""
        self._arrive()
        return self._keys

    @keys.setter
    def keys(self, tensor: Any) -> None:
        self._keys = tensor

    @property
    def values(self) -> Any:
        """As keys."""
        self._arrive()
        return self._values

    @values.setter
    def values(self, tensor: Any) -> None:
        self._values = tensor

    def expect(self, keys: Any, values: Any, arrival: Callable[[], None] | None = None) -> None:
        """The layer holds these; their contents are there once arrival() has returned."""
        self.lazy_initialization(keys, values)
        self._keys, self._values, self._arrival = keys, values, arrival

    def _arrive(self) -> None:
        if self._arrival is not None:
            self._arrival()
            self._arrival = None

    def get_seq_length(self) -> int:
        """Tokens held, arriving ones included; doesn't wait."""
        if not self.is_initialized or self._keys.numel() == 0:
            return 0
        return int(self._keys.shape[-2])

    def update(
        self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Appends, and returns all keys and values in the dtype given."""
        kept = self.kv_dtype or key_states.dtype
        keys, values = super().update(key_states.to(kept), value_states.to(kept), *args, **kwargs)
        if self.after_update is not None:
            self.after_update()
        return keys.to(key_states.dtype), values.to(value_states.dtype)


def new_cache(config: Any, kv_dtype: Any = None) -> Any:
    """An empty DynamicCache of FlashLayers for a model's text configuration.

    Raises UnsupportedModelError where a layer keeps anything but keys and values of tokens.
    """
    cache = DynamicCache(config=config)
    if not cache.layers:
        raise UnsupportedModelError("the model's cache has no layers", value=type(cache).__name__)
    for number, layer in enumerate(cache.layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UnsupportedModelError(
                f"layer {number} of the model keeps something else than keys and values of tokens",
                value=type(layer).__name__,
                limit="full, sliding-window or chunked attention",
            )
    cache.layers = [FlashLayer(kv_dtype) for _ in cache.layers]
    return cache


def check_layers(cache: Any, *, plain: bool) -> None:
    """Refuses a cache whose layers don't hold all tokens as they are stored.

    plain: layers of transformers itself do as well.
    """
    layers = getattr(cache, "layers", None)
    if not layers:
        raise UnsupportedModelError("the cache has no layers", value=type(cache).__name__)
    for number, layer in enumerate(layers):
        if type(layer) is FlashLayer or (plain and type(layer) is DynamicLayer):
            continue
        raise UnsupportedModelError(
            f"layer {number} of the cache is not a dense one that holds all tokens",
            value=type(layer).__name__,
            limit="DynamicLayer or FlashLayer" if plain else "FlashLayer",
            advice="Make caches with PrefixCache.new_cache()",
        )


def reads_of(layers: int) -> list[range]:
    """Layers of each read, in the order in which a model needs them: 1, 1, 2, 4, 8, 8, ..."""
    reads: list[range] = []
    first, count = 0, 1
    while first < layers:
        reads.append(range(first, min(layers, first + count)))
        if len(reads) > 1:
            count = min(2 * count, LAYERS_A_READ)
        first = reads[-1].stop
    return reads


def patiently(submit: Callable[[], Ticket], earlier: Sequence[Ticket]) -> Ticket:
    """Submits; where too much is in flight, once tickets of the same caller are done.

    Raises BusyError where none of them is to be waited for.
    """
    for ticket in tuple(earlier):
        with suppress(BusyError):
            return submit()
        ticket.wait()
    return submit()


class Arrivals:
    """Reads of a prefix on their way, a few layers each.

    submit(layers) starts the reads of these layers, one a sequence. The lease is given back when
    the last one has been waited for, or failed.
    """

    def __init__(
        self,
        client: Client,
        layers: int,
        leases: Sequence[Lease],
        submit: Callable[[range], list[Ticket]],
    ) -> None:
        self._client = client
        self._leases = leases
        self._reads: list[list[Ticket]] = []
        self._read_of: list[int] = []
        try:
            for part in reads_of(layers):
                self._read_of += [len(self._reads)] * len(part)
                self._reads.append(submit(part))
        except BaseException:
            self.finish()
            raise

    def wait(self, layer: int) -> None:
        """Returns once the layer is there. Raises PrefixLostError."""
        number = self._read_of[layer]
        lost = [what for ticket in self._reads[number] if (what := _loss(ticket))]
        if lost or number + 1 == len(self._reads):
            self.finish()
        if lost:
            raise PrefixLostError(
                f"layer {layer} of a stored prefix could not be read",
                value=lost[0],
                advice="Compute the tokens again, with a new cache",
            )

    def finish(self) -> None:
        """Waits for all reads and gives the leases back: the memory is the caller's alone again."""
        for tickets in self._reads:
            for ticket in tickets:
                ticket.wait()
        self._client.drain()
        for lease in self._leases:
            lease.release()


def _loss(ticket: Ticket) -> str:
    """What is wrong with a read once it is over; nothing: an empty text."""
    ticket.wait()
    if ticket.error is not None:
        return str(ticket.error)
    return "" if ticket.result.all_ok else str(ticket.result)
