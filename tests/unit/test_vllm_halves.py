"""The two halves of the vLLM connector without vLLM: a plain scheduler and tensors in its place.

What a request stored in some layout of pages comes back into other pages of another layout, bit for
bit; and what must not be stored isn't.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small_stores import IDENTITY

import flashkv
from flashkv import BatchResult, BlockStatus, MemoryViewError, OptionsError
from flashkv.connectors import vllm_worker
from flashkv.connectors.shared_store import SharedStore, StoreSettings
from flashkv.connectors.vllm_model import (
    PagedLayout,
    UnsupportedSetupError,
    model_identity,
    paged_layout,
)
from flashkv.connectors.vllm_pages import PagedMemory
from flashkv.connectors.vllm_plan import Heard
from flashkv.connectors.vllm_ranks import Ranks, SnapshotLookup
from flashkv.connectors.vllm_scheduler import SchedulerSide, StoreLookup, salt_of
from flashkv.connectors.vllm_setup import Setup
from flashkv.connectors.vllm_worker import WorkerSide
from flashkv.getting import PendingGet

torch = pytest.importorskip("torch")

LAYERS, HEADS, DIM = 3, 2, 32
NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
PAGES = 400
SMALL = {"segment_bytes": 8 << 20, "staging_bytes": 8 << 20}


class FullAttentionSpec(SimpleNamespace):
    """As far as the connector asks vLLM's."""

    def __init__(self, block_size: int, **changes: Any) -> None:
        known = {
            "block_size": block_size,
            "num_kv_heads": HEADS,
            "num_heads": HEADS,
            "head_size": DIM,
            "head_size_v": DIM,
            "dtype": torch.float32,
            "kv_quant_mode": 0,
            "state_content_size_bytes": 2 * DIM * 4,
            "tokens_per_state": 1,
            "non_causal": False,
            "page_size_bytes": HEADS * block_size * 2 * DIM * 4,
        }
        super().__init__(**{**known, **changes})


class MLAAttentionSpec(FullAttentionSpec):
    """Likewise."""


class SlidingWindowSpec(FullAttentionSpec):
    """Likewise."""


def config(**changes: Any) -> Any:
    """A VllmConfig as far as it is looked into."""
    text = SimpleNamespace(kv_lora_rank=24, qk_rope_head_dim=8, rope_parameters={})
    model = SimpleNamespace(
        hf_text_config=text,
        hf_config=SimpleNamespace(to_dict=dict),
        get_total_num_kv_heads=lambda: HEADS,
        model="",
        revision=None,
        dtype=torch.float32,
        quantization=None,
        disable_sliding_window=False,
        seed=0,
        max_model_len=2048,
    )
    parallel = SimpleNamespace(
        pipeline_parallel_size=1,
        tensor_parallel_size=1,
        data_parallel_size=1,
        data_parallel_rank=0,
        nnodes=1,
        distributed_executor_backend="uni",
    )
    made = SimpleNamespace(
        model_config=model,
        parallel_config=parallel,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        speculative_config=None,
        load_config=SimpleNamespace(load_format="auto"),
        scheduler_config=SimpleNamespace(async_scheduling=False, long_prefill_token_threshold=0),
        kv_transfer_config=SimpleNamespace(
            kv_load_failure_policy="recompute", kv_connector_extra_config={"path": "/nowhere"}
        ),
    )
    for name, value in changes.items():
        where, _, field = name.partition("__")
        if field:
            setattr(getattr(made, where), field, value)
        else:
            setattr(made, where, value)
    return made


def cache_config(*specs: Any, layers: list[str] | None = None) -> Any:
    groups = [SimpleNamespace(layer_names=layers or NAMES[::-1], kv_cache_spec=s) for s in specs]
    return SimpleNamespace(kv_cache_groups=groups)


class Request(SimpleNamespace):
    """A request of vLLM as far as the connector looks."""

    def __init__(self, name: str, ids: list[int], **changes: Any) -> None:
        known = {
            "request_id": name,
            "all_token_ids": list(ids),
            "num_computed_tokens": 0,
            "prompt_embeds": None,
            "resumable": False,
            "cache_salt": None,
            "lora_request": None,
            "mm_features": [],
            "skip_reading_prefix_cache": False,
            "block_ids": [],
        }
        super().__init__(**{**known, **changes})

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


LAYOUTS = {
    "pages of 16, head by head": (16, "BHNC", "joined"),
    "pages of 32, token by token": (32, "BNHC", "joined"),
    "pages of 64, heads outside": (64, "HBNC", "joined"),
    "pages of 128, head by head": (128, "BHNC", "joined"),
    "pages of 128, token by token": (128, "BNHC", "joined"),
    "pages of 32, keys, then values": (32, "BHNC", "split"),
    "pages of 32, keys transposed": (32, "BHNC", "transposed"),
    "pages of 128, keys transposed": (128, "BHNC", "transposed"),
}


def caches(block_size: int, order: str, content: int = 2 * DIM, heads: int = HEADS) -> Any:
    """One cache a layer, logically [page, head, token, content], in some physical order."""
    sizes = {"B": PAGES, "H": heads, "N": block_size, "C": content}
    moved = [torch.full([sizes[axis] for axis in order], -1.0) for _ in range(LAYERS)]
    logical = [tensor.permute([order.index(axis) for axis in "BHNC"]) for tensor in moved]
    return dict(zip(NAMES, logical, strict=True))


class Engine:
    """Both halves on one store, and vLLM's part in words of a few lines."""

    def __init__(
        self,
        shared: SharedStore,
        block_size: int = 32,
        order: str = "BHNC",
        form: str = "joined",
        **options: Any,
    ) -> None:
        salt, between = options.pop("salt", ""), options.pop("between", False)
        spec = options.pop("spec", None) or FullAttentionSpec(block_size)
        self.block_size = block_size
        self.form = form
        kernel_form = None if form == "joined" else lambda *_: form
        self.layout = paged_layout(config(), cache_config(spec), kernel_form)
        assert shared.store is not None
        namespace = shared.namespace(IDENTITY.with_geometry(self.layout.geometry))
        assert namespace is not None
        self.namespace = namespace
        self.scheduler = SchedulerSide(
            StoreLookup(shared.store, namespace), self.layout, salt=salt, between=between
        )
        self.worker = WorkerSide(shared, namespace, self.layout, **options)
        self.caches = caches(block_size, order)
        self.worker.register(self.caches)
        self.free = np.random.default_rng(block_size).permutation(PAGES).tolist()
        self.requests: dict[str, Request] = {}

    def start(self, request: Request, computed: int = 0) -> int | None:
        """A request arrives and gets blocks for all of its tokens; tokens found in the store."""
        self.requests[request.request_id] = request
        self.scheduler.on_new_request(request)
        return self.schedule(request, computed)

    def schedule(self, request: Request, computed: int = 0) -> int | None:
        found, _ = self.scheduler.match(request, computed)
        if found is None:
            return None
        self.grow(request)
        if found:
            self.scheduler.allocated(request, request.block_ids, found)
        request.num_computed_tokens = computed + found
        return found

    def grow(self, request: Request) -> None:
        while len(request.block_ids) * self.block_size < request.num_tokens:
            request.block_ids.append(self.free.pop())

    def step(self, tokens: dict[str, int], drafts: int = 0, **released: Any) -> set[int]:
        """Computes tokens of requests (and drafts after them); vLLM's blocks that failed."""
        counts = {name: count + drafts for name, count in tokens.items() if count}
        output = SimpleNamespace(
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            finished_req_ids=released.get("finished", set()),
            preempted_req_ids=released.get("preempted", set()),
            kv_connector_block_state=SimpleNamespace(
                resolve_block_ids=lambda name: (self.requests[name].block_ids,)
            ),
        )
        plan = self.scheduler.plan(output)
        self.worker.release(plan.released)
        self.worker.begin(plan)
        for name in NAMES:
            self.worker.wait_for_layer(name)
            for request_id, count in counts.items():
                self.compute(self.requests[request_id], count, name)
        self.worker.save(plan)
        over = self.worker.finished(idle=plan.idle)
        failed = self.worker.failed_blocks()
        self.scheduler.heard(over, failed, self.worker.heard())
        for request_id, count in tokens.items():
            self.requests[request_id].num_computed_tokens += count
        return failed

    def compute(self, request: Request, count: int, name: str) -> None:
        first = request.num_computed_tokens
        end = min(first + count, len(request.block_ids) * self.block_size)
        for token in range(first, end):
            for cell, vector in zip(
                self.cells(request, token, name), numbers(request, token, name), strict=True
            ):
                cell[:] = vector

    def cells(self, request: Request, token: int, name: str) -> tuple[Any, Any]:
        """Where the keys and the values of a token lie: [head, dim] each."""
        cache, slot = self.caches[name], token % self.block_size
        page = cache[request.block_ids[token // self.block_size]]
        if self.form == "joined":
            return page[:, slot, :DIM], page[:, slot, DIM:]
        keys, values = page.reshape(HEADS, 2, -1).unbind(1)
        whole = keys.unflatten(1, (DIM, self.block_size)).transpose(1, 2)
        if self.form == "split":
            whole = keys.unflatten(1, (self.block_size, DIM))
        return whole[:, slot], values.unflatten(1, (self.block_size, DIM))[:, slot]

    def holds(self, request: Request, tokens: int, first: int = 0) -> bool:
        """Whether the caches hold what was computed of these tokens of the request."""
        return all(
            torch.equal(cell, vector)
            for name in NAMES
            for token in range(first, tokens)
            for cell, vector in zip(
                self.cells(request, token, name), numbers(request, token, name), strict=True
            )
        )

    def settle(self) -> None:
        """All saves are over."""
        self.worker.release(list(self.worker._saving))
        for _ in range(200):
            self.worker.finished(idle=False)
            if not self.worker._saving:
                return
            __import__("time").sleep(0.01)

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()


def numbers(request: Request, token: int, name: str) -> Any:
    """K and V of a token: of its layer and all tokens up to it. [2, head, dim]."""
    past = np.asarray(request.all_token_ids[: token + 1], np.int64)
    drafts = getattr(request, "drafts", [])
    if token >= request.num_tokens:
        past = np.append(past, drafts[: token + 1 - request.num_tokens])
    seed = int((past * (np.arange(len(past)) + 3)).sum()) * 31 + NAMES.index(name)
    spread = (seed + np.arange(2 * HEADS * DIM, dtype=np.int64) * 7919) % 65_521
    return torch.from_numpy(spread.astype(np.float32).reshape(2, HEADS, DIM))


@pytest.fixture
def shared(disk_path: Path) -> Iterator[SharedStore]:
    settings = StoreSettings(str(disk_path / "store"), "64MiB", options=SMALL)
    geometry = flashkv.KVGeometry.gqa(LAYERS, HEADS, DIM, "float32")
    made = SharedStore.acquire(settings, geometry, engine="vLLM")
    yield made
    made.release()


IDS = [(i * 7919) % 509 + 1 for i in range(400)]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_into_pages_of_any_layout(shared: SharedStore, layout: tuple[int, str, str]) -> None:
    source = Engine(shared, *layout)
    request = Request("a", IDS[:330])
    assert source.start(request) == 0
    source.step({"a": 150})  # chunks of a prompt
    source.step({"a": 180})
    source.settle()
    assert source.worker.counts["saved_tokens"] == 320
    for other in LAYOUTS.values():
        target = Engine(shared, *other, layer_groups=2)
        again = Request("b", IDS[:330])
        assert target.start(again) == 320
        assert target.step({"b": 10}) == set()
        assert target.holds(again, 330)
        target.close()
    source.close()


def test_keys_are_those_of_the_chain(shared: SharedStore) -> None:
    """What another engine stored under flashkv's own chain is found."""
    engine = Engine(shared)
    keys = engine.namespace.token_keys(IDS[:128], salt=b"pepper")
    blocks = np.zeros((2, LAYERS, 2, HEADS, 64, DIM), np.float32)
    assert engine.namespace.put(keys, blocks).all_ok
    assert engine.start(Request("a", IDS)) == 0
    assert engine.start(Request("b", IDS, cache_salt="pepper")) == 128
    engine.close()
    salted = Engine(shared, salt="pepper")
    assert salted.start(Request("a", IDS)) == 128
    assert salted.start(Request("b", IDS, cache_salt="pepper")) == 0
    salted.close()


def test_salts_never_meet() -> None:
    told = {salt_of(*pair) for pair in (("", None), ("a", None), ("a", "b"), ("ab", ""), ("", "b"))}
    assert len(told) == 5
    assert salt_of("", "") == b""


def test_the_last_token_is_computed(shared: SharedStore) -> None:
    engine = Engine(shared)
    engine.start(Request("a", IDS[:128]))
    engine.step({"a": 128})
    engine.settle()
    assert engine.start(Request("b", IDS[:128])) == 64
    assert engine.start(Request("c", IDS[:129])) == 128
    assert engine.start(Request("d", IDS[:129], skip_reading_prefix_cache=True)) == 0
    engine.close()


def test_a_load_begins_within_a_granule(shared: SharedStore) -> None:
    """vLLM has 96 tokens itself: of the granule that they end in only the rest is written."""
    engine = Engine(shared, 16)
    engine.start(Request("a", IDS))
    engine.step({"a": 400})
    engine.settle()
    request = Request("b", IDS)
    assert engine.start(request, computed=96) == 288
    assert engine.step({"b": 16}) == set()
    assert engine.holds(request, 400, first=96)
    own = request.block_ids[:6]
    assert all((cache[own] == -1).all() for cache in engine.caches.values())
    engine.close()


def test_drafts_are_not_stored(shared: SharedStore) -> None:
    engine = Engine(shared)
    request = Request("a", IDS[:60], drafts=[5, 6, 7, 8, 9, 10])
    engine.start(request)
    engine.step({"a": 60})
    for ids in ([1], [2, 3], [4]):  # accepted one by one, while six drafts are computed with them
        request.all_token_ids += ids
        engine.grow(request)
        engine.step({"a": len(ids)}, drafts=6)
    engine.settle()
    assert request.num_computed_tokens == 64
    assert engine.worker.counts["saved_tokens"] == 64
    same = Request("b", [*IDS[:60], 1, 2, 3, 4, 9])
    assert engine.start(same) == 64
    engine.step({"b": 1})
    assert engine.holds(same, 65)
    assert engine.start(Request("c", [*IDS[:60], 1, 2, 5, 6, 9])) == 0
    engine.close()


def test_what_a_granule_holds_is_in_its_key(shared: SharedStore, tmp_path: Path) -> None:
    """Adapters by name and content, pictures by hash and place; text before a picture is shared."""

    def picture(name: str, offset: int) -> Any:
        place = SimpleNamespace(offset=offset, length=40)
        return SimpleNamespace(identifier=name, mm_position=place)

    def adapter(name: str, path: Path) -> Any:
        return SimpleNamespace(lora_name=name, lora_path=str(path))

    path = tmp_path / "adapter"
    path.mkdir()
    (path / "adapter_model.bin").write_bytes(bytes(1000))
    (path / "adapter_config.json").write_text('{"r": 8}')
    engine = Engine(shared)
    engine.start(Request("a", IDS, mm_features=[picture("cat", 150)]))
    engine.start(Request("l", IDS, lora_request=adapter("x", path)))
    engine.step({"a": 400, "l": 400})
    engine.settle()
    assert engine.start(Request("b", IDS, mm_features=[picture("cat", 150)])) == 384
    assert engine.start(Request("c", IDS, mm_features=[picture("dog", 150)])) == 128
    assert engine.start(Request("d", IDS, mm_features=[picture("cat", 151)])) == 128
    assert engine.start(Request("e", IDS)) == 128
    assert engine.start(Request("f", IDS, lora_request=adapter("x", path))) == 384
    assert engine.start(Request("g", IDS, lora_request=adapter("y", path))) == 0
    (path / "adapter_config.json").write_text('{"r": 9}')
    assert engine.start(Request("h", IDS, lora_request=adapter("x", path))) == 0
    engine.close()


def test_requests_that_no_key_describes(shared: SharedStore) -> None:
    engine = Engine(shared)
    engine.start(Request("a", IDS, prompt_embeds=object()))
    engine.start(Request("b", IDS, resumable=True))
    engine.step({"a": 200, "b": 200})
    engine.settle()
    assert engine.worker.counts["saved_tokens"] == 0
    engine.close()


def unread(monkeypatch: pytest.MonkeyPatch, engine: Engine, *rows: int) -> None:
    """Gets leave these rows unread."""
    ask, end = type(engine.namespace).ask, PendingGet.end

    def asked(self: Any, keys: Any, out: Any, options: Any) -> Any:
        keys = np.array(keys)
        keys[[row for row in rows if row < len(keys)]] ^= 0xFF  # keys of nothing
        return ask(self, keys, out, options)

    def ended(self: Any) -> BatchResult:
        statuses = end(self).statuses.copy()
        statuses[[row for row in rows if row < len(statuses)]] = BlockStatus.IO_ERROR
        return BatchResult(statuses)

    monkeypatch.setattr(type(engine.namespace), "ask", asked)
    monkeypatch.setattr(PendingGet, "end", ended)


@pytest.mark.parametrize("between", [False, True])
def test_a_failed_load(shared: SharedStore, monkeypatch: pytest.MonkeyPatch, between: bool) -> None:
    engine = Engine(shared, between=between)
    engine.start(Request("a", IDS))
    engine.step({"a": 400})
    engine.settle()
    assert not shared.events
    unread(monkeypatch, engine, 2)
    request = Request("b", [*IDS[:390], *range(100, 200)])
    assert engine.start(request) == 384
    failed: set[int] = set()
    if between:
        for _ in range(500):
            failed |= engine.step({})
            if failed:
                break
    else:
        failed = engine.step({"b": 106})
    assert failed == set(request.block_ids[4:6])
    assert engine.holds(request, 128)
    assert dict(shared.events) == {"get_io_error": 1}
    engine.settle()
    if not between:  # computed on what failed: not stored
        assert engine.worker.counts["spoilt_tokens"] == 64
    # As vLLM takes it back, and computes what failed; the request is not offered the store again.
    request.num_computed_tokens = 128
    assert engine.scheduler.match(request, 128) == (0, False)
    engine.step({"b": 362})
    engine.settle()
    monkeypatch.undo()
    last = Request("c", request.all_token_ids)
    assert engine.start(last) == 448
    while engine.requests["c"].num_computed_tokens < 490:
        engine.step({"c": 42} if not between else {})
        if between and not engine.scheduler._loading:
            break
    assert engine.holds(last, 448)
    engine.close()


def test_others_wait_for_what_is_being_loaded(shared: SharedStore) -> None:
    engine = Engine(shared, between=True)
    engine.start(Request("a", IDS))
    engine.step({"a": 400})
    engine.settle()
    assert engine.start(Request("b", IDS)) == 384
    waiting = Request("c", IDS)
    assert engine.start(waiting) is None
    for _ in range(500):
        engine.step({})
        if not engine.scheduler._loading:
            break
    assert engine.schedule(waiting) == 384
    engine.close()


def test_blocks_are_captured_before_they_are_written_again(
    shared: SharedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that runs late still stores what was computed, though its request is gone."""
    engine = Engine(shared)
    held, original = threading.Event(), type(engine.namespace).put

    def put(*arguments: Any, **options: Any) -> BatchResult:
        held.wait(5)
        return original(*arguments, **options)

    monkeypatch.setattr(type(engine.namespace), "put", put)
    first = Request("a", IDS[:128])
    engine.start(first)
    engine.step({"a": 128})
    engine.scheduler.finished("a")
    threading.Timer(0.2, held.set).start()
    second = Request("b", IDS[128:256], block_ids=list(first.block_ids))  # the same blocks
    engine.start(second)
    engine.step({"b": 128}, finished={"a"})
    engine.settle()
    monkeypatch.undo()
    for name, ids in (("c", IDS[:129]), ("d", [*IDS[128:256], 5])):
        request = Request(name, ids)
        assert engine.start(request) == 128
        engine.step({name: 1})
        assert engine.holds(request, 129)
    engine.close()


def test_weights_that_were_updated(shared: SharedStore) -> None:
    """What is stored, or on its way, is of the old ones."""
    engine = Engine(shared)
    engine.start(Request("a", IDS))
    engine.step({"a": 400})
    assert engine.scheduler.forget()
    engine.settle()
    assert engine.start(Request("b", IDS)) == 0
    engine.step({"b": 400})
    engine.settle()
    assert engine.start(Request("c", IDS)) == 384
    engine.step({"c": 16})
    engine.scheduler._lookup.forget = lambda: False  # type: ignore[method-assign]
    assert engine.scheduler.forget()
    engine.step({})
    assert engine.start(Request("d", IDS)) == 0
    engine.close()


def test_saves_become_durable_by_themselves(
    shared: SharedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines may be idle, or killed: nothing has to follow a save."""
    assert shared.store is not None
    flushed = threading.Event()
    monkeypatch.setattr(vllm_worker, "DURABLE_AFTER_MS", 50)
    monkeypatch.setattr(shared.store, "flush", flushed.set)
    engine = Engine(shared)
    engine.start(Request("a", IDS))
    engine.step({"a": 400})
    assert flushed.wait(10)
    monkeypatch.undo()
    engine.close()


def test_a_closed_store_is_no_error(shared: SharedStore) -> None:
    engine = Engine(shared)
    engine.start(Request("a", IDS))
    assert shared.store is not None
    shared.store.close()
    engine.step({"a": 400})
    assert engine.worker.counts["unsaved_tokens"] == 384
    assert "put" in shared.events
    engine.close()


# ---- workers in other processes ----


def test_a_scheduler_elsewhere(disk_path: Path) -> None:
    layout = paged_layout(config(), cache_config(FullAttentionSpec(32)))
    identity = IDENTITY.with_geometry(layout.geometry)
    settings = StoreSettings(str(disk_path / "store"), "64MiB", options=SMALL)
    ranks = Ranks(apart=True, size=2, engine=None)
    half = PagedLayout(**{**layout.__dict__, "heads": 1})
    keys = flashkv.identity.token_keys(identity.digest(), IDS[:256])
    blocks = np.zeros((4, LAYERS, 2, 1, 64, DIM), np.float32)
    stores = []
    for rank, count in enumerate((3, 2)):
        store = SharedStore.acquire(ranks.settings(settings, rank), layout.geometry, engine="x")
        stores.append(store)
        namespace = store.namespace(identity, ranks.shard(half, rank))
        assert namespace is not None
        assert namespace.put(keys[:count], blocks[:count]).all_ok
        assert store.store is not None
        store.store.flush()
    lookup = SnapshotLookup(identity.digest(), 2)
    assert lookup.match(keys) == (0, None)
    lookup.open(settings, ranks, half, identity)
    assert lookup.match(keys) == (2, None)
    first, second = Heard({keys[2].tobytes(): 1}), Heard({keys[2].tobytes(): 2})
    lookup.hear(first)
    assert lookup.match(keys) == (2, None)
    first.add(second)
    lookup.hear(first)
    assert lookup.match(keys) == (3, None)
    lookup.hear(Heard(lost={keys[1].tobytes()}))
    assert lookup.match(keys) == (1, None)
    lookup.hear(Heard({keys[1].tobytes(): 3}))
    assert lookup.match(keys) == (3, None)
    assert not lookup.forget()
    assert lookup.match(keys) == (0, None)
    lookup.hear(Heard({keys[0].tobytes(): 3}))
    assert lookup.match(keys) == (1, None)
    lookup.close()
    for store in stores:
        store.release()


def test_ranks() -> None:
    layout = paged_layout(config(), cache_config(FullAttentionSpec(32)))
    ranks = Ranks(apart=True, size=3, engine=1)
    with pytest.raises(UnsupportedSetupError, match="KV heads"):
        ranks.shard(layout, 0)
    for changes in ({"nnodes": 2}, {"distributed_executor_backend": "ray"}):
        given = config(**{f"parallel_config__{name}": value for name, value in changes.items()})
        with pytest.raises(OptionsError, match="other machines"):
            Ranks.of(given)


# ---- what vLLM's configuration says ----


def test_layouts() -> None:
    known = paged_layout(config(), cache_config(FullAttentionSpec(32)))
    assert (known.form, known.granule, known.layers) == ("joined", 64, tuple(NAMES))
    assert known.geometry == flashkv.KVGeometry.gqa(LAYERS, HEADS, DIM, "float32")
    many = [f"model.layers.{n}.attn" for n in range(12)]
    whole = paged_layout(config(), cache_config(FullAttentionSpec(32), layers=sorted(many)))
    assert whole.layers == tuple(many)
    slots = FullAttentionSpec(32, num_heads=2, num_kv_heads=4, state_content_size_bytes=4 * DIM * 4)
    assert paged_layout(config(), cache_config(slots)).reason.endswith("2 slots of 512 bytes")
    packed = paged_layout(config(), cache_config(FullAttentionSpec(32)), lambda *_: "opaque")
    assert packed.reason == "the attention kernel packs keys or values"
    latent = MLAAttentionSpec(16, num_heads=1, num_kv_heads=1, state_content_size_bytes=32 * 4)
    mla = paged_layout(config(), cache_config(latent))
    assert mla.geometry == flashkv.KVGeometry.mla(LAYERS, 24, 8, "float32")
    fp8 = FullAttentionSpec(32, dtype=torch.uint8, kv_quant_mode=1, state_content_size_bytes=64)
    eight = paged_layout(config(cache_config__cache_dtype="fp8"), cache_config(fp8))
    assert eight.geometry == flashkv.KVGeometry.gqa(LAYERS, HEADS, DIM, "float8_e4m3fn")


def test_what_is_not_understood_is_opaque(shared: SharedStore) -> None:
    """Packed content: blocks of vLLM's own size, and why."""
    spec = FullAttentionSpec(32, kv_quant_mode=3)
    engine = Engine(shared, 32, "BNHC", spec=spec)
    assert engine.layout.form == "opaque"
    assert "float32" in engine.layout.reason
    request = Request("a", IDS)
    engine.start(request)
    engine.step({"a": 400})
    engine.settle()
    assert engine.worker.counts["saved_tokens"] == 384
    again = Request("b", IDS)
    assert engine.start(again) == 384
    engine.step({"b": 16})
    assert engine.holds(again, 400)
    engine.close()


@pytest.mark.parametrize(
    ("changes", "specs", "said"),
    [
        ({}, [FullAttentionSpec(32), SlidingWindowSpec(32)], "several groups"),
        ({}, [SlidingWindowSpec(32)], "SlidingWindowSpec"),
        ({}, [FullAttentionSpec(96)], "block_size 96"),
        ({}, [FullAttentionSpec(32, non_causal=True)], "later ones"),
        ({"parallel_config__pipeline_parallel_size": 2}, [FullAttentionSpec(32)], "pipeline"),
        (
            {"parallel_config__decode_context_parallel_size": 2},
            [FullAttentionSpec(32)],
            "context parallelism",
        ),
        (
            {"speculative_config": SimpleNamespace(method="eagle3")},
            [FullAttentionSpec(32)],
            "draft model.*'eagle3'",
        ),
    ],
    ids=str,
)
def test_refused_models(changes: dict[str, Any], specs: list[Any], said: str) -> None:
    with pytest.raises(UnsupportedSetupError, match=said):
        paged_layout(config(**changes), cache_config(*specs))


def test_drafts_without_kv_are_no_matter() -> None:
    given = config(speculative_config=SimpleNamespace(method="ngram"))
    assert paged_layout(given, cache_config(FullAttentionSpec(32))).form == "joined"


@pytest.mark.parametrize(
    ("transfer", "scheduler", "said"),
    [
        ({"kv_load_failure_policy": "fail"}, {}, 'kv_load_failure_policy="recompute"'),
        ({"kv_connector_extra_config": {}}, {}, "need a path"),
        ({"kv_connector_extra_config": {"path": "p", "pth": 1}}, {}, "have no 'pth'"),
        ({"kv_connector_extra_config": {"path": "p", "loads": "now"}}, {}, "'now'"),
        ({"kv_connector_extra_config": {"path": "p", "layer_groups": 9}}, {}, "layer_groups"),
        (
            {"kv_connector_extra_config": {"path": "p", "loads": "layerwise"}},
            {"async_scheduling": True},
            "async_scheduling",
        ),
    ],
    ids=str,
)
def test_wrong_settings(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    transfer: dict[str, Any],
    scheduler: dict[str, Any],
    said: str,
) -> None:
    made = setup_of(monkeypatch, tmp_path, scheduler, transfer)
    with pytest.raises(OptionsError, match=said):
        made()


def setup_of(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    scheduler: dict[str, Any],
    transfer: dict[str, Any],
) -> Any:
    from flashkv.connectors import vllm_setup

    monkeypatch.setattr(vllm_setup, "own_config", lambda _: {})
    given = config(model_config__model=str(checkpoint(tmp_path)))
    given.kv_transfer_config.__dict__.update(transfer)
    given.scheduler_config.__dict__.update(scheduler)
    return lambda: Setup.of(given, cache_config(FullAttentionSpec(32)))


def test_how_loads_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not setup_of(monkeypatch, tmp_path, {}, {})().between
    asynchronous = {"async_scheduling": True}
    assert setup_of(monkeypatch, tmp_path, asynchronous, {})().between
    threshold = {"long_prefill_token_threshold": 64}
    assert setup_of(monkeypatch, tmp_path, threshold, {})().between


def checkpoint(path: Path) -> Path:
    folder = path / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"hidden_size": 64}')
    (folder / "model.bin").write_bytes(bytes(range(256)) * 8)
    return folder


def test_identities(tmp_path: Path) -> None:
    """What changes the numbers changes the identity; a plain model's is any engine's."""
    folder = str(checkpoint(tmp_path))

    def digest(own: dict[str, Any] | None = None, **changes: Any) -> bytes:
        given = config(model_config__model=folder, **changes)
        layout = paged_layout(given, cache_config(FullAttentionSpec(32)))
        return model_identity(given, layout, own or {}).digest()

    plain = digest()
    from flashkv.connectors.checkpoint import Checkpoint

    geometry = flashkv.KVGeometry.gqa(LAYERS, HEADS, DIM, "float32")
    shared = Checkpoint.read(folder).identity(geometry, kv_dtype="float32", running={}, own={})
    assert plain == shared.digest()
    longrope = SimpleNamespace(rope_parameters={"rope_type": "longrope"}, sliding_window=9)
    assert digest(cache_config__cache_dtype="float32") == plain
    others = [
        digest({"rope_theta": 5.0}),
        digest(model_config__quantization="fp8"),
        digest(model_config__hf_text_config=longrope),
        digest(model_config__hf_text_config=longrope, model_config__max_model_len=9),
        digest(
            model_config__hf_text_config=longrope,
            model_config__disable_sliding_window=True,
        ),
        digest(load_config__load_format="dummy"),
        digest(load_config__load_format="dummy", model_config__seed=1),
        digest(model_config__dtype=torch.bfloat16),
    ]
    assert len({plain, *others}) == 1 + len(others)


def test_caches_that_are_not_as_told() -> None:
    layout = paged_layout(config(), cache_config(FullAttentionSpec(32)))
    good = caches(32, "BHNC")
    assert PagedMemory(layout, good).page_tokens == 32
    assert PagedMemory(layout, caches(16, "BHNC")).page_tokens == 16  # kernels' smaller blocks
    for wrong, said in (
        ({NAMES[0]: good[NAMES[0]]}, "no cache of a layer"),
        ({**good, NAMES[1]: good[NAMES[1]][:5]}, "differ in shape"),
        ({name: cache[0] for name, cache in good.items()}, "not .page, head"),
        (caches(24, "BHNC"), "don't make up"),
    ):
        with pytest.raises(MemoryViewError, match=said):
            PagedMemory(layout, wrong)


def test_a_layer_that_shares_anothers_cache() -> None:
    layout = paged_layout(config(), cache_config(FullAttentionSpec(32)))
    good = caches(32, "BHNC")
    memory = PagedMemory(layout, {**good, "model.layers.9.attn": good[NAMES[1]]})
    assert memory.layer_number("model.layers.9.attn") == 1
    assert memory.layer_number("of another model") is None


# ---- the face ----


def test_the_face_without_vllm() -> None:
    if "vllm" in sys.modules:
        pytest.skip("vLLM is installed here")
    from flashkv.connectors import vllm
    from flashkv.connectors.engines import EngineMissingError

    with pytest.raises(EngineMissingError, match="needs vLLM, which is not installed"):
        vllm.FlashKVConnector  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        vllm.Nothing  # noqa: B018


def test_loads_are_split_by_their_size(shared: SharedStore) -> None:
    engine = Engine(shared)
    size = 64 * engine.layout.geometry.token_bytes(0)
    groups = engine.worker._layer_groups_of
    assert groups(1) == [(0, 1, 2)]
    assert groups(vllm_worker.LAYER_GROUP_BYTES // size + 1) == [(0, 1), (2,)]
    assert groups(10_000) == [(0,), (1,), (2,)]
    engine.close()
