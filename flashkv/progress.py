"""How far a get has come, layer by layer: the engine computes with those that are in place."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from flashkv import checks, limits
from flashkv.errors import OptionsError, OutOfMemoryError
from flashkv.geometry import KVGeometry
from flashkv.native import ffi, lib

SLICE_MS: Final = 100


class LayerProgress:
    """Layers of one get, in their order. Safe for all threads; for a second get make another."""

    def __init__(self, layers: int) -> None:
        """layers: of the group's longest plane. Raises OptionsError, OutOfMemoryError."""
        self.layers = layers = checks.whole(OptionsError, "layers", layers, 1, limits.LAYERS_MAX)
        native = lib.fkv_progress_new(layers)
        if native == ffi.NULL:
            raise OutOfMemoryError("no memory to follow a get's layers")
        self.native = ffi.gc(native, lib.fkv_progress_free)
        self._lock = threading.Lock()
        self._begun = False

    @classmethod
    def of_group(cls, geometry: KVGeometry, group: int) -> LayerProgress:
        """For gets of a group. Raises OutOfMemoryError."""
        return cls(_layers_of(geometry, group))

    def check_group(self, geometry: KVGeometry, group: int) -> None:
        """Raises OptionsError where it was made for another number of layers."""
        layers = _layers_of(geometry, group)
        if layers != self.layers:
            raise OptionsError(
                "progress has another number of layers than the group",
                value=self.layers,
                limit=layers,
                advice="LayerProgress.of_group(namespace.geometry, group)",
            )

    @property
    def settled(self) -> int:
        """How many leading layers are in place, or won't come."""
        return int(lib.fkv_progress_wait(self.native, self.layers, 0))

    @property
    def failed_layer(self) -> int | None:
        """The first layer that some block lacks, as far as is known by now; None: none."""
        layer = int(lib.fkv_progress_failed(self.native))
        return layer if layer < self.layers else None

    def wait(self, layer: int, timeout_ms: float | None = None) -> bool:
        """Waits until all layers up to `layer` are in place, those that the get doesn't want aside.

        layer: as the namespace's geometry counts, whatever layers the get chose.
        False where the time ran out, or some block lacks one of them: failed_layer says which.
        Raises OptionsError for a layer that the group doesn't have.
        """
        layer = checks.whole(OptionsError, "layer", layer, 0, self.layers - 1)
        given_s = math.inf
        if timeout_ms is not None:
            given_s = checks.seconds(OptionsError, "timeout_ms", timeout_ms)
        end = time.monotonic() + given_s
        settled = 0
        while settled <= layer:  # in slices: signals are heard between them
            left_ms = 1e3 * (end - time.monotonic())
            slice_ms = math.ceil(min(max(left_ms, 0), SLICE_MS))
            settled = int(lib.fkv_progress_wait(self.native, layer + 1, slice_ms))
            if left_ms <= 0:
                break
        failed = self.failed_layer
        return settled > layer and (failed is None or failed > layer)

    def fail(self, layer: int = 0) -> None:
        """Some block lacks its data from this layer on."""
        lib.fkv_progress_fail(self.native, layer)

    def end(self) -> None:
        """Nothing more comes."""
        lib.fkv_progress_end(self.native)

    def begin(self) -> None:
        """A get goes by it. Raises OptionsError where another one did before."""
        with self._lock:
            if self._begun:
                raise OptionsError(
                    "progress was given to another get before", advice="make one for each get"
                )
            self._begun = True


@contextmanager
def following(progress: LayerProgress | None) -> Iterator[None]:
    """Around a get: whatever becomes of it, nobody waits for its layers afterwards."""
    if progress is None:
        yield
        return
    checks.instance(OptionsError, "progress", progress, LayerProgress)
    progress.begin()
    try:
        yield
    except BaseException:
        progress.fail()
        raise
    finally:
        progress.end()


def _layers_of(geometry: KVGeometry, group: int) -> int:
    return max(plane.layers for plane in geometry.groups[group].planes)
