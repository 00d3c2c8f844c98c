"""flashkv: an embeddable store for LLM KV-cache blocks on flash.

store = flashkv.open("/nvme/kv", capacity="64GiB", geometry=KVGeometry.gqa(32, 8, 128, "bfloat16"))
blocks = store.namespace(Identity(model="my/model", revision="main"))
blocks.put(keys, tensors)
blocks.get(keys, destinations)
"""

from flashkv.client import Client
from flashkv.errors import (
    BackendError,
    BatchResult,
    BlockStatus,
    BusyError,
    CancelledError,
    CapacityError,
    ClosedError,
    DurabilityError,
    FlashKVError,
    ForkedError,
    FormatError,
    GeometryError,
    IdentityError,
    KeyFormatError,
    LockedError,
    MemoryViewError,
    NotAStoreError,
    OptionsError,
    ReadOnlyDestinationError,
    ReadOnlyStoreError,
    StoreAccessError,
    StoreError,
    SuperblockError,
    TimedOutError,
)
from flashkv.estimate import LoadPlan
from flashkv.geometry import Group, GroupKind, KVGeometry, MemoryView, Plane, Role
from flashkv.identity import Identity, Shard, weights_fingerprint
from flashkv.leases import Lease
from flashkv.memory import Pointers, Regions
from flashkv.namespace import Match, Namespace
from flashkv.options import Options
from flashkv.pipeline import Pipeline, Step
from flashkv.progress import LayerProgress
from flashkv.stats import Stats
from flashkv.store import Store, open  # noqa: A004
from flashkv.tickets import Milestone, Release, Ticket

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "BatchResult",
    "BlockStatus",
    "BusyError",
    "CancelledError",
    "CapacityError",
    "Client",
    "ClosedError",
    "DurabilityError",
    "FlashKVError",
    "ForkedError",
    "FormatError",
    "GeometryError",
    "Group",
    "GroupKind",
    "Identity",
    "IdentityError",
    "KVGeometry",
    "KeyFormatError",
    "LayerProgress",
    "Lease",
    "LoadPlan",
    "LockedError",
    "Match",
    "MemoryView",
    "MemoryViewError",
    "Milestone",
    "Namespace",
    "NotAStoreError",
    "Options",
    "OptionsError",
    "Pipeline",
    "Plane",
    "Pointers",
    "ReadOnlyDestinationError",
    "ReadOnlyStoreError",
    "Regions",
    "Release",
    "Role",
    "Shard",
    "Stats",
    "Step",
    "Store",
    "StoreAccessError",
    "StoreError",
    "SuperblockError",
    "Ticket",
    "TimedOutError",
    "open",
    "weights_fingerprint",
]
