"""Bounded levels and cold through the store: within what records say, whatever the way back.

What the stripes hold is tests/native/test_bounded.py's; here it is records, fidelity and profiles.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import bounded_reference as bounded
import numpy as np
import pytest
from flashkv.tools.facts import store_facts
from flashkv.tools.inspection import StoreView
from flashkv.tools.record_facts import record_detail, segment_records
from store_support import BACKENDS, GQA, IDENTITY, crash, open_store, segment_file

from flashkv import (
    BlockStatus,
    Identity,
    KVGeometry,
    MemoryView,
    Namespace,
    Options,
    Store,
    limits,
)
from flashkv.errors import OptionsError
from flashkv.native import lib
from flashkv.profiles import Profile

LOSSY = ("bounded-1", "bounded-2", "bounded-3", "bounded-4", "cold")
TOKENS, BLOCKS = 32, 12
KEYS = [b"block %d" % n for n in range(BLOCKS)]
PARENTS = [b"", *KEYS[:-1]]
MODES = {"bfloat16": 0, "float16": 1, "float32": 2}
PROFILE: dict[str, Any] = {
    "model": "test",
    "layers": 2,
    "levels": {"bounded-2": {"k": [0.1, 0.4], "v": [0.2, 0.8]}},
}


def numbers_of(seed: int = 1, dim: int = 64) -> np.ndarray:
    """float32 [token, layer, plane, head, dim]: channels of unlike deviation that drift slowly."""
    rng = np.random.default_rng(seed)
    scale = np.exp2(rng.normal(size=(2, 2, 2, dim)))
    middle = scale * rng.normal(size=scale.shape) * 2
    deviation = np.zeros((TOKENS * BLOCKS, *scale.shape))
    for t in range(1, len(deviation)):
        deviation[t] = 0.7 * deviation[t - 1] + 0.7 * rng.normal(size=scale.shape)
    return (middle + scale * deviation).astype(np.float32)


def bits_of(numbers: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (numbers.view(np.uint32) >> 16).astype(np.uint16)
    return numbers.astype(np.float16 if dtype == "float16" else np.float32)


def numbers_from(bits: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.astype(np.float32)


def blocks_of(dtype: str = "bfloat16", seed: int = 1) -> np.ndarray:
    """Bits [block, layer, plane, head, token, dim]."""
    numbers = bits_of(numbers_of(seed), dtype)
    cut = numbers.reshape(BLOCKS, TOKENS, *numbers.shape[1:])
    return np.ascontiguousarray(cut.transpose(0, 2, 3, 4, 1, 5))


def put(store: Store, blocks: np.ndarray, **how: Any) -> None:
    ns = store.namespace(IDENTITY)
    assert ns.put(KEYS, blocks, parents=PARENTS, position=0, **how).all_ok


def got(store: Store, blocks: np.ndarray, **how: Any) -> np.ndarray:
    out = np.zeros_like(blocks)
    assert store.namespace(IDENTITY).get(KEYS, out, **how).all_ok
    return out


def details(path: Path) -> list[Any]:
    """Every data record of a store, in words."""
    view = StoreView(path)
    return [
        record_detail(view, number, row.page)
        for number, segment in view.segments.items()
        for row in segment_records(view, segment)
        if row.kind == "data"
    ]


def steps_on_disk(path: Path, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps of key channels [record, layer, head, dim]; greatest ones of values [record, ...]."""
    channels, tokens = [], []
    for detail in details(path):
        own = np.zeros((2, 2, 64)), np.zeros((2, 2, 1))
        for stream in detail.streams:
            parameters = np.frombuffer(stream.parameters, np.uint8)
            kind = bounded.TOKENS if stream.role == "v" else bounded.CHANNELS
            assert stream.mode.startswith("bounded by " + ("token" if stream.role == "v" else "ch"))
            found = bounded.stream_of(parameters, kind[MODES[dtype]])
            if stream.role == "v":
                own[1][stream.layer, stream.head] = max(found.steps)
            else:
                own[0][stream.layer, stream.head] = [c.step for c in found.channels]
        channels.append(own[0])
        tokens.append(own[1])
    return np.array(channels), np.array(tokens)


@pytest.mark.parametrize("dtype", sorted(MODES))
@pytest.mark.parametrize("codec", LOSSY)
def test_within_the_bound_that_the_record_says(tmp_path: Path, codec: str, dtype: str) -> None:
    blocks = blocks_of(dtype)
    with open_store(tmp_path / "s", KVGeometry.gqa(2, 2, 64, dtype), codec=codec) as store:
        put(store, blocks)
        first = got(store, blocks)
    with open_store(tmp_path / "s", None) as store:
        assert got(store, blocks).tobytes() == first.tobytes()
    x, y = numbers_from(blocks, dtype).astype(np.float64), numbers_from(first, dtype)
    assert (blocks[0, ..., :4, :] == first[0, ..., :4, :]).all()  # the sequence's beginning
    assert not (blocks[8, ..., :4, :] == first[8, ..., :4, :]).all()  # another record's
    facts = details(tmp_path / "s")
    assert [d.header["fidelity"] for d in facts] == [codec] * len(facts)
    assert {d.header["codec"] for d in facts} == {codec.split("-", maxsplit=1)[0]}
    assert len(facts) == 2  # blocks 0 to 7 and the others
    channels, tokens = steps_on_disk(tmp_path / "s", dtype)
    rounding = np.abs(y) * {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-23}[dtype]
    for record, part in enumerate((slice(0, 8), slice(8, None))):
        off = np.abs(x - y)[part] - rounding[part] - np.abs(x[part]) * 2.0**-21
        assert (off[:, :, 0] <= channels[record][None, :, :, None, :] / 2).all()
        assert (off[:, :, 1] <= tokens[record][None, :, :, None, :] / 2).all()
        assert np.abs(x - y)[part][:, :, 0].max() > channels[record].max() / 8  # and not exact


@pytest.mark.parametrize("codec", ["bounded-2", "cold"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_and_layouts_read_the_same(tmp_path: Path, codec: str, backend: str) -> None:
    blocks = blocks_of()
    with open_store(tmp_path / "s", codec=codec, backend=backend) as store:
        ns = store.namespace(IDENTITY)
        put(store, blocks)
        whole = got(store, blocks)
        some = np.zeros((2, *blocks.shape[1:4], 7, 64), np.uint16)
        assert ns.get([KEYS[3], KEYS[9]], some, token_range=(5, 12)).all_ok
        assert (some == whole[[3, 9], ..., 5:12, :]).all()
        head = np.zeros((1, 1, 2, 1, TOKENS, 64), np.uint16)
        assert ns.get([KEYS[11]], head, layers=[1], heads=[1]).all_ok
        assert (head[0, 0, :, 0] == whole[11, 1, :, 1]).all()
        order = MemoryView("token layer plane head")
        moved = np.zeros((BLOCKS, TOKENS, 2, 2, 2, 64), np.uint16)
        assert ns.get(KEYS, moved, view=order).all_ok
        assert (moved.transpose(0, 2, 3, 4, 1, 5) == whole).all()
        # Put from another layout, elements apart: the same numbers.
        wide = np.zeros((*moved.shape, 2), np.uint16)
        wide[..., 0] = blocks.transpose(0, 4, 1, 2, 3, 5)
        keys = [b"again %d" % n for n in range(BLOCKS)]
        assert ns.put(keys, wide[..., 0], view=order, parents=[b"", *keys[:-1]], position=0).all_ok
        again = np.zeros_like(blocks)
        assert ns.get(keys, again).all_ok
        assert (again == whole).all()


@pytest.mark.parametrize("codec", ["bounded-3", "cold"])
def test_special_values_come_back_bit_for_bit(tmp_path: Path, codec: str) -> None:
    blocks = blocks_of()
    rng = np.random.default_rng(5)
    special = np.array([0x7F80, 0xFF80, 0x7FC1, 0x7F81, 0xFFFF, 0x7F7F, 0xFF7F], np.uint16)
    where = rng.random(blocks.shape) < 0.001
    blocks[where] = rng.choice(special[:5], int(where.sum()))
    with open_store(tmp_path / "s", codec=codec) as store:
        put(store, blocks)
        out = got(store, blocks)
    assert (out[where] == blocks[where]).all()
    assert {d.header["fidelity"] for d in details(tmp_path / "s")} == {codec}


def test_what_no_bound_makes_smaller_stays_exact(tmp_path: Path) -> None:
    """Any bits, one-byte elements and few tokens: without loss, and the record says so."""
    rng = np.random.default_rng(2)
    blocks = rng.integers(0, 65536, (BLOCKS, 2, 2, 2, TOKENS, 64)).astype(np.uint16)
    with open_store(tmp_path / "s", codec="bounded-4") as store:
        put(store, blocks)
        assert (got(store, blocks) == blocks).all()
    assert {d.header["fidelity"] for d in details(tmp_path / "s")} == {"exact"}
    assert {d.header["codec"] for d in details(tmp_path / "s")} == {"lossless"}
    eight = rng.integers(0, 256, (BLOCKS, 2, 2, 2, TOKENS, 64)).astype(np.uint8)
    geometry = KVGeometry.gqa(2, 2, 64, "float8_e4m3fn")
    with open_store(tmp_path / "8", geometry, codec="bounded-1") as store:
        put(store, eight)
        assert (got(store, eight) == eight).all()
    one = blocks_of()[:, :, :, :, :3]
    with open_store(tmp_path / "1", codec="bounded-1") as store:
        ns = store.namespace(IDENTITY)
        assert ns.put([b"1"], one[:1], tokens=3).all_ok
        out = np.zeros_like(one[:1])
        assert ns.get([b"1"], out, tokens=3).all_ok
        assert (out == one[:1]).all()


def test_vectors_that_drift_take_no_more_than_without_bounds(tmp_path: Path) -> None:
    """Two or three tokens a page, and each page's first one has nothing to be predicted from."""
    dim = 1024
    geometry = KVGeometry.gqa(1, 1, dim, "bfloat16")
    rng = np.random.default_rng(6)
    drift = np.cumsum(np.full((96, dim), 1.0), 0) + 0.01 * rng.normal(size=(96, dim))
    numbers = np.stack([drift, rng.normal(size=drift.shape)]).astype(np.float32)
    block = np.ascontiguousarray(bits_of(numbers, "bfloat16")[None, None, :, None])
    sizes = []
    for codec in ("bounded-1", "lossless"):
        with open_store(tmp_path / codec, geometry, codec=codec) as store:
            ns = store.namespace(IDENTITY)
            assert ns.put([b"k"], block).all_ok
            out = np.zeros_like(block)
            assert ns.get([b"k"], out).all_ok
            sizes.append(store.stats().record_bytes_written)
        x, y = numbers_from(block, "bfloat16"), numbers_from(out, "bfloat16")
        assert np.abs(x - y).max() < 2
    assert sizes[0] < sizes[1] * 1.02


def test_latents_are_bounded(tmp_path: Path) -> None:
    geometry = KVGeometry.mla(2, 64, 32, "bfloat16")
    numbers = bits_of(numbers_of(3, dim=96)[:, :, 0, 0], "bfloat16")  # [token, layer, 96]
    latent = numbers[..., :64].transpose(1, 0, 2).reshape(-1)
    rope = numbers[..., 64:].transpose(1, 0, 2).reshape(-1)
    block = np.concatenate([latent, rope]).view(np.uint8)[None]
    with open_store(tmp_path / "s", geometry, codec="bounded-1") as store:
        ns = store.namespace(IDENTITY)
        view = MemoryView("plane layer head token", block_tokens=TOKENS * BLOCKS)
        assert ns.put([b"k"], block, view=view).all_ok
        out = np.zeros_like(block)
        assert ns.get([b"k"], out, view=view).all_ok
    x, y = (numbers_from(b.view(np.uint16), "bfloat16") for b in (block, out))
    assert 0 < np.abs(x - y).mean() < 0.05 * np.abs(x).mean()
    assert {s.mode for d in details(tmp_path / "s") for s in d.streams} == {
        "bounded by channel, bfloat16"
    }


def test_a_crash_and_damage(tmp_path: Path) -> None:
    """What was flushed is there with its fidelity; a page that changed is a miss, never numbers."""
    blocks = blocks_of()
    store = open_store(tmp_path / "s", codec="bounded-2")
    put(store, blocks)
    whole = got(store, blocks)
    store.flush()
    crash(store)
    with open_store(tmp_path / "s") as store:  # its tail is scanned
        assert got(store, blocks, min_fidelity="bounded-2").tobytes() == whole.tobytes()
        exact = store.namespace(IDENTITY).get(KEYS, np.zeros_like(blocks), min_fidelity="exact")
        assert (exact.statuses == BlockStatus.MISS).all()
    detail = details(tmp_path / "s")[0]
    file = segment_file(tmp_path / "s", 0)
    content = bytearray(file.read_bytes())
    at = (detail.page + detail.header["header_pages"]) * 4096
    content[at + 100] ^= 4
    file.write_bytes(content)
    with open_store(tmp_path / "s") as store:
        out = np.zeros_like(blocks)
        result = store.namespace(IDENTITY).get(KEYS, out)
        assert not result.ok.all()
        assert (out[result.ok] == whole[result.ok]).all()


# ---- fidelity


def test_better_supersedes_worse_is_skipped(tmp_path: Path) -> None:
    blocks = blocks_of()
    with open_store(tmp_path / "s", codec="bounded-3") as store:
        ns = store.namespace(IDENTITY)
        put(store, blocks)
        coarse = got(store, blocks)
        for codec in ("bounded-3", "bounded-4"):
            again = ns.put(KEYS, blocks, codec=codec)
            assert (again.statuses == BlockStatus.PRESENT).all()
        put(store, blocks, codec="bounded-1")
        finer = got(store, blocks)
        put(store, blocks, codec="cold")
        cold = got(store, blocks)
        for codec in ("bounded-1", "cold"):
            assert (ns.put(KEYS, blocks, codec=codec).statuses == BlockStatus.PRESENT).all()
        put(store, blocks, codec="lossless")
        assert (got(store, blocks, min_fidelity="exact") == blocks).all()
        assert (ns.put(KEYS, blocks).statuses == BlockStatus.PRESENT).all()
        with pytest.raises(OptionsError):
            ns.put(KEYS, blocks, codec="bounded-5")
    errors = [
        np.abs(numbers_from(out, "bfloat16") - numbers_from(blocks, "bfloat16")).mean()
        for out in (cold, finer, coarse)
    ]
    assert 0 < errors[0] < errors[1] < errors[2] / 2
    with open_store(tmp_path / "s") as store:
        assert (got(store, blocks) == blocks).all()


def test_lookups_ask_for_a_fidelity(tmp_path: Path) -> None:
    blocks = blocks_of()
    with open_store(tmp_path / "s") as store:
        ns = store.namespace(IDENTITY)
        assert ns.put(KEYS[:5], blocks[:5]).all_ok
        assert ns.put(KEYS[5:], blocks[5:], codec="bounded-2").all_ok
        counts = [ns.match(KEYS, min_fidelity=f).count for f in ("exact", "bounded-1", "bounded-2")]
        assert counts == [5, 5, BLOCKS]
        assert ns.match(KEYS).count == BLOCKS
        assert ns.match(KEYS[5:], min_fidelity="exact").count == 0
        leased = ns.match(KEYS, lease_ms=1000, min_fidelity="exact")
        assert leased.count == 5
        assert leased.lease is not None
        leased.lease.release()
        out = np.zeros_like(blocks)
        result = ns.get(KEYS, out, min_fidelity="bounded-1")
        assert result.ok.tolist() == [True] * 5 + [False] * (BLOCKS - 5)
        assert ns.get(KEYS, out, min_fidelity="bounded-4").all_ok
        assert ns.match(KEYS, min_fidelity="cold").count == 5
        for call in (ns.match, lambda keys, **how: ns.get(keys, out, **how)):
            with pytest.raises(OptionsError):
                call(KEYS, min_fidelity="best")


def test_exact_blocks_are_converted_once(tmp_path: Path) -> None:
    blocks = blocks_of()
    with open_store(tmp_path / "a", codec="bounded-2") as store:
        put(store, blocks)
        expected = got(store, blocks)
    with open_store(tmp_path / "b") as store:
        ns = store.namespace(IDENTITY)
        put(store, blocks)
        keys = [*KEYS, b"never put"]
        result = ns.convert(keys, "bounded-2", parents=[*PARENTS, b""], position=0)
        assert result.statuses.tolist() == [BlockStatus.OK] * BLOCKS + [BlockStatus.MISS]
        assert (got(store, blocks) == expected).all()
        for codec in ("bounded-4", "cold", "bounded-1"):  # never again
            again = ns.convert(KEYS, codec)
            assert (again.statuses == BlockStatus.PRESENT).all()
        assert (got(store, blocks) == expected).all()
        for codec in ("lossless", "raw", "exact", "zip"):
            with pytest.raises(OptionsError):
                ns.convert(KEYS, codec)
    with open_store(tmp_path / "b") as store:
        assert (got(store, blocks) == expected).all()


def test_conversion_brings_nothing_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A delete on another thread comes before a converted run or behind it, never between."""
    blocks = blocks_of()
    with open_store(tmp_path / "s") as store:
        ns = store.namespace(IDENTITY)
        put(store, blocks)
        deleted = threading.Event()
        real, threads = Namespace.get, []

        def delete() -> None:
            ns.delete(KEYS)
            deleted.set()

        def read(self: Namespace, *arguments: Any, **how: Any) -> Any:
            result = real(self, *arguments, **how)
            threads.append(threading.Thread(target=delete))
            threads[-1].start()
            assert not deleted.wait(0.3)  # it has to wait until the run was put
            return result

        monkeypatch.setattr(Namespace, "get", read)
        assert ns.convert(KEYS, "bounded-2").all_ok
        for thread in threads:
            thread.join()
        assert not ns.contains(KEYS).any()


@pytest.mark.parametrize("gone", [0, 1, 5])
def test_a_run_of_which_some_is_gone(tmp_path: Path, gone: int) -> None:
    """The others keep their positions: only the sequence's first tokens stay exact."""
    blocks = blocks_of()
    with open_store(tmp_path / "s") as store:
        ns = store.namespace(IDENTITY)
        put(store, blocks)
        real, calls = Namespace.get, []

        def read(self: Namespace, keys: Any, *arguments: Any, **how: Any) -> Any:
            if not calls:
                ns.delete([KEYS[gone]])  # between the look-up and the read
            calls.append(len(keys))
            return real(self, keys, *arguments, **how)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Namespace, "get", read)
            statuses = ns.convert(KEYS, "bounded-2", parents=PARENTS, position=0).statuses
        assert calls == [BLOCKS] + [1] * BLOCKS
        expected = [BlockStatus.OK] * BLOCKS
        expected[gone] = BlockStatus.MISS
        assert statuses.tolist() == expected
        out = np.zeros_like(blocks)
        ns.get(KEYS, out)
    first = (blocks[..., :4, :] == out[..., :4, :]).reshape(BLOCKS, -1).all(axis=1)
    assert first.tolist() == [n == 0 and gone != 0 for n in range(BLOCKS)]


def test_what_was_converted_meanwhile_is_present(tmp_path: Path) -> None:
    blocks = blocks_of()
    with open_store(tmp_path / "s") as store:
        ns = store.namespace(IDENTITY)
        put(store, blocks)
        real, calls = Namespace.get, []

        def read(self: Namespace, *arguments: Any, **how: Any) -> Any:
            if not calls:
                calls.append(1)
                assert ns.convert(KEYS[2:4], "cold").all_ok
            return real(self, *arguments, **how)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Namespace, "get", read)
            statuses = ns.convert(KEYS, "bounded-2").statuses
        expected = [BlockStatus.OK] * BLOCKS
        expected[2:4] = [BlockStatus.PRESENT] * 2
        assert statuses.tolist() == expected


def test_nothing_is_written_anew_for_nothing(tmp_path: Path) -> None:
    """No codec makes elements of one byte lossy."""
    geometry = KVGeometry.gqa(2, 2, 64, "float8_e4m3fn")
    blocks = np.zeros((BLOCKS, 2, 2, 2, TOKENS, 64), np.uint8)
    with open_store(tmp_path / "s", geometry) as store:
        put(store, blocks)
        before = store.stats().records
        statuses = store.namespace(IDENTITY).convert(KEYS, "bounded-1").statuses
        assert (statuses == BlockStatus.PRESENT).all()
        assert store.stats().records == before


# ---- profiles


def test_a_profile_rules_the_steps_and_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(PROFILE, indent=2))
    blocks = blocks_of()
    options = Options(codec="bounded-2", profile=PROFILE)
    assert options.profile == Options(codec="bounded-2", profile=str(file)).profile
    with open_store(tmp_path / "s", codec="bounded-2", profile=file) as store:
        put(store, blocks)
        (digest,) = store.profiles()
        assert store.profiles()[digest] == PROFILE
    channels, tokens = steps_on_disk(tmp_path / "s", "bfloat16")
    assert 3 < np.exp(np.log(channels[:, 1] / channels[:, 0]).mean()) < 5.5  # 4 times the factor
    assert (tokens[:, 1].mean() / tokens[:, 0].mean()) > 2
    facts = details(tmp_path / "s")
    assert {d.header["profile"] for d in facts} == {digest.hex()}
    assert "profile" in [tlv.name for tlv in facts[0].tlvs]
    for _ in range(2):  # through logs that were begun anew
        with open_store(tmp_path / "s", codec="bounded-2") as store:
            assert store.profiles() == {digest: PROFILE}
            assert got(store, blocks).any()
    assert store_facts(StoreView(tmp_path / "s")).manifest.entries["profile"] == 1
    with open_store(tmp_path / "s", read_only=True) as store:
        assert store.profiles() == {digest: PROFILE}


def test_levels_that_a_profile_lacks_need_none(tmp_path: Path) -> None:
    blocks = blocks_of()
    with open_store(tmp_path / "s", codec="bounded-1", profile=PROFILE) as store:
        put(store, blocks)
        assert store.profiles() == {}
    assert all("profile" not in detail.header for detail in details(tmp_path / "s"))


def test_the_profile_used_last_stays(tmp_path: Path) -> None:
    blocks = blocks_of()
    digests = []
    for number in (*range(limits.PROFILES_MAX), 0, limits.PROFILES_MAX):
        profile = {**PROFILE, "model": f"model {number}"}
        with open_store(tmp_path / "s", codec="bounded-2", profile=profile) as store:
            put(store, blocks, replace=True)
            digests.append(Profile.load(profile).digest)
            kept = list(store.profiles())
    assert len(kept) == limits.PROFILES_MAX
    assert kept == [*digests[2:-2], digests[0], digests[-1]]


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 0},
        {"layers": True},
        {"levels": {"bounded-9": {"k": [1, 1], "v": [1, 1]}}},
        {"levels": {"bounded-1": {"k": [1.0], "v": [1, 1]}}},
        {"levels": {"bounded-1": {"k": [1.0, 0], "v": [1, 1]}}},
        {"levels": {"bounded-1": {"k": [1.0, float("nan")], "v": [1, 1]}}},
        {"levels": {"bounded-1": {"v": [1, 1]}}},
        {"levels": {"bounded-1": {"k": [1.0, 10**400], "v": [1, 1]}}},
        {"levels": []},
        {
            "levels": {
                "bounded-1": {"k": [0.1, 0.5], "v": [0.2, 0.8]},
                "bounded-3": {"k": [0.2, 0.4], "v": [0.2, 0.8]},
            }
        },
        {"note": "x" * 70000},
    ],
)
def test_profiles_that_are_none(change: dict[str, Any]) -> None:
    with pytest.raises(OptionsError):
        Options(profile={**PROFILE, **change})


def test_profiles_that_do_not_fit(tmp_path: Path) -> None:
    for wrong in (3, tmp_path / "none.json", b"{", [1]):
        with pytest.raises(OptionsError):
            Options(profile=wrong)
    deeper = {"layers": 3, "levels": {}}
    with pytest.raises(OptionsError, match="depth"):
        open_store(tmp_path / "s", GQA, profile=deeper)


def test_the_environment_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = blocks_of()
    monkeypatch.setenv("FLASHKV_CODEC", "cold")
    with open_store(tmp_path / "s") as store:
        put(store, blocks)
        assert not (got(store, blocks) == blocks).all()
    monkeypatch.setenv("FLASHKV_CODEC", "raw")
    with open_store(tmp_path / "s", codec="cold") as store:  # the operator's way out
        ns = store.namespace(Identity(model="other"))
        assert ns.put(KEYS, blocks).all_ok
        out = np.zeros_like(blocks)
        assert ns.get(KEYS, out).all_ok
        assert (out == blocks).all()
        assert not (got(store, blocks) == blocks).all()  # the old records stay readable
    assert lib.FKV_FIDELITY_COLD == 1
