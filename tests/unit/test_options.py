"""Options are valid once made, or an OptionsError names option, value and limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashkv import limits
from flashkv.errors import OptionsError
from flashkv.native import lib
from flashkv.options import Options, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GiB", 8 << 30),
        (" 512 MB ", 512 * 10**6),
        ("1.5KiB", 1536),
        ("0", 0),
        ("7", 7),
        ("2tib", 2 << 40),
        (4096, 4096),
    ],
)
def test_parse_bytes(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "8 GoB", "-1", "1e3", "0x10", -1, 1.5, True, None])
def test_parse_bytes_refuses(text: object) -> None:
    with pytest.raises(OptionsError, match="capacity"):
        parse_bytes(text, "capacity")  # type: ignore[arg-type]


@given(st.integers(0, 1 << 50))
def test_parse_bytes_is_exact_for_integers(number: int) -> None:
    assert parse_bytes(f"{number}B") == number
    assert parse_bytes(f"{number} KiB") == number << 10


def test_sizes_may_be_text() -> None:
    options = Options(read_buffer_bytes="8MiB", segment_bytes="16 MiB")
    assert options.read_buffer_bytes == 8 << 20
    assert options.segment_bytes == 16 << 20


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("backend", "aio"),
        ("codec", "zip"),
        ("queue_depth", 0),
        ("queue_depth", 10**6),
        ("queue_depth", True),
        ("workers", 0),
        ("workers", "4"),
        ("io_threads", 10**6),
        ("retries", -1),
        ("read_buffer_bytes", "1KiB"),
        ("staging_bytes", "1PiB"),
        ("segment_bytes", "1MiB"),
        ("segment_bytes", (4 << 20) + 1),
        ("segment_bytes", "2GiB"),
        ("low_watermark", 0.97),
        ("high_watermark", 1.5),
        ("high_watermark", "high"),
        ("growth", ()),
        ("growth", ((16, 256),)),
        ("growth", ((0, 256), (0, 512))),
        ("growth", ((0, 512), (4096, 256))),
        ("growth", ((0, 2048),)),
        ("growth", "256"),
        ("bloom", 1),
        ("direct_io", None),
        ("max_lease_ms", 0),
        ("read_gap_bytes", "64MiB"),
        ("read_amplification", 0.5),
    ],
)
def test_impossible_values_are_named(name: str, value: object) -> None:
    with pytest.raises(OptionsError) as caught:
        Options(**{name: value})  # type: ignore[arg-type]
    word = name.replace("low_", "").replace("high_", "")
    assert word in str(caught.value) or name in str(caught.value)


def test_environment_overrides() -> None:
    options = Options(backend="io_uring", codec="lossless")
    assert options.resolved({}) is options
    resolved = options.resolved({"FLASHKV_BACKEND": "threads", "FLASHKV_CODEC": "raw"})
    assert (resolved.backend, resolved.codec) == ("threads", "raw")
    assert resolved.queue_depth == options.queue_depth
    with pytest.raises(OptionsError, match="FLASHKV_CODEC"):
        options.resolved({"FLASHKV_CODEC": "zip"})


def test_environment_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHKV_BACKEND", "threads")
    assert Options().resolved().backend == "threads"


def test_limits_are_those_of_the_format() -> None:
    for name in ("PAGE_BYTES", "KEY_BYTES_MAX", "BLOCK_TOKENS_MAX", "BLOCKS_PER_RECORD_MAX",
                 "PLANES_MAX", "SHARD_BYTES", "NAMESPACE_BYTES", "DIGEST_BYTES"):  # fmt: skip
        assert getattr(limits, name) == getattr(lib, f"FKV_{name}"), name
