"""flashkv-bench codec: the figures' names and that they are of what was coded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import realkv
from flashkv.tools.bench_codec import Record, Tensors, ratio, read, records, run_codec
from flashkv.tools.bench_sets import BenchError


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    rng = np.random.default_rng(3)
    values = rng.normal(size=(2, 2, 2, 1024, 64)).astype(np.float32)
    return Tensors("noise", "bfloat16", (values.view(np.uint32) >> 16).astype(np.uint16))


def test_ratios_are_of_whole_pages(tensors: Tensors) -> None:
    made = records([tensors], 512, "lossless")
    assert len(made) == 2
    for record in made:
        assert record.stored_bytes % 4096 == 0
        assert record.expected.nbytes == 2 * 2 * 2 * 512 * 64 * 2
    assert 1.4 < ratio([tensors], 512) < 1.6
    assert 1.3 < ratio([tensors], 512, "fast") < 1.45


def test_damage_is_not_decoded(tensors: Tensors) -> None:
    record = Record(tensors, 0, 64, 16, "lossless")
    record.encode()
    record.bind()
    record.decode()
    record.check()
    at = int(record._records["buffer_offset"][0]) + record.stored_bytes - 4096
    record._buffer[at] ^= 1  # in the last page
    with pytest.raises(BenchError, match="not decoded"):
        record.decode()
    record._buffer[at] ^= 1
    record.expected[0, 0, 0, 0, 0] ^= 1
    with pytest.raises(BenchError, match="other bytes"):
        record.check()


def test_wider_vectors_are_those_of_neighbouring_heads(tensors: Tensors) -> None:
    wide = tensors.wider(128).values
    assert wide.shape == (2, 2, 1, 1024, 128)
    for layer, plane in ((0, 0), (1, 1)):
        assert (wide[layer, plane, 0, :, :64] == tensors.values[layer, plane, 0]).all()
        assert (wide[layer, plane, 0, :, 64:] == tensors.values[layer, plane, 1]).all()


def test_a_folder_without_tensors(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"no \.safetensors"):
        read(tmp_path)


@pytest.mark.skipif(not realkv.full_set(), reason="the full set of real tensors is not there")
def test_all_figures(capsys: pytest.CaptureFixture[str]) -> None:
    figures = run_codec(realkv.FULL_SET, print)
    assert figures["lossless_bf16_ratio_on_disk"] > 1.49
    assert figures["ratio_by_run_length"]["32"] > 1.35
    assert figures["lossless_fp16_ratio_on_disk"] > 1.15
    assert figures["fast_ratio_on_disk"] > 1.38
    assert figures["lossless_decode_gbps"] > 0
    assert figures["fast_encode_gbps"] > 0
    assert "speed of fast" in capsys.readouterr().out
