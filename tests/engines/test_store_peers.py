"""flashkv-bench peers with the engines' own storages: what they keep comes back, and is compared.
No speed is judged.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from flashkv.tools.peers_roster import ROSTER, why_not
from flashkv.tools.peers_run import PeersSettings, run_peers
from store_support import ROOT

ENVIRONMENTS = Path(os.environ.get("FLASHKV_ENGINES") or ROOT / ".engines").resolve()
KIB256 = 256 << 10


@pytest.mark.parametrize("peer", [name for name in ROSTER if ROSTER[name].environment])
def test_an_engine_s_storage_is_measured(peer: str, disk_path: Path) -> None:
    if reason := why_not(peer, ENVIRONMENTS):
        pytest.skip(reason)
    settings = PeersSettings(
        disk_path,
        ENVIRONMENTS,
        size_bytes=8 * KIB256,
        rounds=1,
        batch=4,
        block_bytes=(KIB256,),
        peers=(peer,),
    )
    figures = run_peers(settings, lambda _: None)
    assert figures["left_out"] == figures["failed"] == {}
    assert all(figures["peers"][peer]["versions"].values())
    assert {"opaque 0.25 MiB", "bf16 0.25 MiB"} == set(figures["figures"])
    for by_peer in figures["figures"].values():
        assert by_peer[peer]["get_mb_per_s"] > 0
        assert by_peer[peer]["disk_ratio"] >= 1
    assert figures["damage"][peer]["blocks"].count("right") == 15
    kept = 0 if figures["peers"][peer]["index_in_memory"] else 4
    restart = figures["restart"][peer]
    assert restart["closed"] == restart["killed_after_flush"] == kept
    assert not list(disk_path.iterdir())
