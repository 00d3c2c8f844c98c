"""The peers of flashkv-bench codec: compared, timed, left out with a reason."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from flashkv.tools.bench_peers import PEERS, UNIT_BYTES, Peer, Step, measure_peers
from flashkv.tools.bench_sets import BenchError

DATA = np.random.default_rng(1).integers(0, 4, 3 * UNIT_BYTES + 100, dtype=np.uint8).tobytes()


def reverse(data: bytes) -> bytes:
    return data[::-1]


def doubling() -> tuple[Step, Step]:
    return lambda data: data + data, lambda data: data[: len(data) // 2]


def test_figures_of_a_peer() -> None:
    steps: list[str] = []
    figures = measure_peers(DATA, None, steps.append, (Peer("mine", "numpy", doubling),))
    assert figures["peers"] == {"mine": np.__version__}
    assert not figures["peers_left_out"]
    for name in ("mine", "mine_32k"):
        assert figures[f"{name}_ratio"] == 0.5
        assert figures[f"{name}_encode_gbps"] > 0
        assert figures[f"{name}_decode_gbps"] > 0
    assert steps == ["mine, beside"]


def test_other_bytes_are_found() -> None:
    wrong = Peer("wrong", "numpy", lambda: (reverse, lambda data: data))
    with pytest.raises(BenchError, match="wrong brought other bytes back, unit 0 of 1"):
        measure_peers(DATA, None, lambda _: None, (wrong,))


def test_who_is_absent_is_named() -> None:
    def absent() -> tuple[Step, Step]:
        raise ImportError("No module named 'zipnn'")

    figures = measure_peers(
        DATA, None, lambda _: None, (Peer("zipnn", "zipnn", absent), Peer("b", "numpy", doubling))
    )
    assert figures["peers_left_out"] == {"zipnn": "No module named 'zipnn'"}
    assert list(figures["peers"]) == ["b"]


def test_packages_are_found_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "some_peer.py").write_text("def same(data):\n    return bytes(data)\n")

    def make() -> tuple[Step, Step]:
        import some_peer

        return some_peer.same, some_peer.same

    before = list(sys.path)
    figures = measure_peers(DATA, tmp_path, lambda _: None, (Peer("some", "numpy", make),))
    assert figures["some_ratio"] == 1.0
    assert sys.path == before


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_real_peers(peer: Peer) -> None:
    pytest.importorskip(peer.package)
    figures = measure_peers(DATA, None, lambda _: None, (peer,))
    assert figures[f"{peer.name}_ratio"] > 1.5
    assert figures[f"{peer.name}_32k_ratio"] > 1.5
