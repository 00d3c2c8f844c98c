"""FlashKVTier under vLLM's own offloading manager: a tiny model, token for token as vLLM alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_stores import edit, segment_files

import flashkv

SMALL = {"segment_bytes": "4MiB", "free_floor_bytes": 0}
ROW = 128  # tokens of a chunk, unless a test says otherwise

Vllm = Callable[..., Any]


@pytest.fixture
def vllm(run_engine: Callable[..., Any], tiny_model: Path, prompt: list[int]) -> Vllm:
    """Runs vllm_tier_run.py and gives what it says."""

    def run(store: Path | None, **changes: Any) -> Any:
        given = {"store": None if store is None else str(store), "prompts": [prompt], "chunk": ROW}
        return run_engine("vllm", "vllm_tier_run.py", tiny_model, json.dumps({**given, **changes}))

    return run


@pytest.fixture(scope="session")
def hybrid_model(random_model: Callable[..., Path]) -> Path:
    """A random Gemma 3: layers of sliding windows and of full attention, two KV groups in vLLM."""
    return random_model(
        "tiny-gemma3",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        std=0.05,
        sliding_window=256,
        layer_types=["sliding_attention", "full_attention"] * 2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )


@pytest.fixture
def alone(vllm: Vllm, prompt: list[int], tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """The greedy tokens of vLLM without flashkv, computed once a session."""
    kept = tmp_path_factory.getbasetemp() / "vllm-alone.json"
    if not kept.exists():
        kept.write_text(json.dumps(vllm(None)["rounds"][0]["tokens"][0]))
    tokens: list[int] = json.loads(kept.read_text())
    return tokens


def test_what_the_tier_promises_the_scheduler(
    run_engine: Callable[..., Any], tiny_model: Path, disk_path: Path
) -> None:
    verdicts = run_engine(
        "vllm", "vllm_tier_alone.py", tiny_model, disk_path, VLLM_LOGGING_LEVEL="ERROR"
    )
    assert len(verdicts) == 10
    assert {name: what for name, what in verdicts.items() if what != "passed"} == {}


def whole(tokens: int, chunk: int = ROW) -> int:
    """Tokens of a prompt's whole chunks; the last token is always computed."""
    return (tokens - 1) // chunk * chunk


@pytest.mark.parametrize("block", [32, 128])
def test_a_restart_loads_what_was_stored(
    vllm: Vllm, alone: list[int], store_path: Path, block: int
) -> None:
    engine = {"block_size": block}
    first = vllm(store_path, engine=engine)
    assert first["rounds"] == [{"tokens": [alone], "cached": [0]}]
    assert first["report"]["blocks"]["stored"] == 11
    assert first["report"]["opaque_reason"] == ""
    second = vllm(store_path, engine=engine)
    assert second["rounds"] == [{"tokens": [alone], "cached": [whole(1500)]}]
    assert second["report"]["blocks"]["loaded"] == 11
    assert second["report"]["events"] == {}
    assert second["metrics"]["vllm:flashkv_blocks:('FlashKVTier',)"] == 11


def test_what_the_primary_tier_lost_comes_from_the_store(
    vllm: Vllm, alone: list[int], prompt: list[int], store_path: Path
) -> None:
    """Two prompts take turns in a primary tier that holds little more than one."""
    other = [(token * 31) % 500 + 1 for token in prompt]
    seen = vllm(store_path, prompts=[prompt], rounds=2, cpu_bytes=4 << 20)
    assert [one["tokens"][0] for one in seen["rounds"]] == [alone, alone]
    both = vllm(store_path, prompts=[prompt, other, prompt[:700] + other[:700]], rounds=3,
                cpu_bytes=6 << 20)  # fmt: skip
    texts = [one["tokens"] for one in both["rounds"]]
    assert texts[0][0] == alone
    assert texts[1] == texts[0]
    assert texts[2] == texts[0]
    assert both["report"]["blocks"]["loaded"] > 11
    expected = vllm(None, prompts=[prompt, other, prompt[:700] + other[:700]])
    assert texts[0] == expected["rounds"][0]["tokens"]


def test_the_page_codec_knows_rows(vllm: Vllm, store_path: Path) -> None:
    """Of bfloat16 the exponents are coded: only where a row's heads are known."""
    engine = {"dtype": "bfloat16"}
    seen = vllm(store_path, engine=engine)
    assert seen["report"]["opaque_reason"] == ""
    assert seen["report"]["store"]["compression"] > 1.2
    again = vllm(store_path, engine=engine)
    assert again["rounds"][0]["cached"] == [whole(1500)]


def test_chunks_too_long_for_a_block_are_opaque(
    vllm: Vllm, alone: list[int], prompt: list[int], store_path: Path
) -> None:
    options = {**SMALL, "segment_bytes": "16MiB"}
    tier = {"capacity": "128MiB", "options": options}
    run = {"chunk": 1152, "prompts": [prompt], "tier": tier}
    first = vllm(store_path, **run)
    assert "1152 tokens" in first["report"]["opaque_reason"]
    second = vllm(store_path, **run)
    assert second["rounds"] == [{"tokens": [alone], "cached": [1152]}]


def test_groups_of_a_hybrid_model(
    run_engine: Callable[..., Any], hybrid_model: Path, prompt: list[int], store_path: Path
) -> None:
    """Full attention needs all chunks, a sliding window the last ones; rows are opaque."""
    run = {"prompts": [prompt], "chunk": ROW, "store": None}
    alone = run_engine("vllm", "vllm_tier_run.py", hybrid_model, json.dumps(run))
    run["store"] = str(store_path)
    run["engine"] = {"disable_hybrid_kv_cache_manager": False}
    first = run_engine("vllm", "vllm_tier_run.py", hybrid_model, json.dumps(run))
    assert "2 KV groups" in first["report"]["opaque_reason"]
    second = run_engine("vllm", "vllm_tier_run.py", hybrid_model, json.dumps(run))
    tokens = alone["rounds"][0]["tokens"]
    assert len(set(tokens[0])) > 6, "the text must depend on the context"
    assert first["rounds"] == [{"tokens": tokens, "cached": [0]}]
    assert second["rounds"] == [{"tokens": tokens, "cached": [whole(1500)]}]
    assert second["report"]["blocks"]["loaded"] > whole(1500) // ROW, "of both groups"


def test_damage_is_computed_again(vllm: Vllm, alone: list[int], store_path: Path) -> None:
    vllm(store_path)
    with edit(segment_files(store_path)[0]) as fd:
        for page in range(300, 700, 40):
            os.pwrite(fd, b"damage" * 8, page * 4096 + 100)
    seen = vllm(store_path)
    assert seen["rounds"][0]["tokens"] == [alone]
    assert 0 < seen["rounds"][0]["cached"][0] < whole(1500)
    assert seen["report"]["blocks"]["stored"] > 0
    healed = vllm(store_path)
    assert healed["rounds"] == [{"tokens": [alone], "cached": [whole(1500)]}]


def test_a_failing_load_is_computed_again(vllm: Vllm, alone: list[int], store_path: Path) -> None:
    """The memory of what failed is not what the model sees; what did arrive is kept."""
    vllm(store_path)
    seen = vllm(store_path, fail=1)
    assert seen["rounds"][0]["tokens"] == [alone]
    assert seen["report"]["blocks"]["vllm:flashkv_failed_loads"] == 5
    assert seen["report"]["blocks"]["loaded"] >= 6
    assert seen["report"]["events"] == {"load_io_error": 1}
    assert vllm(store_path)["rounds"] == [{"tokens": [alone], "cached": [whole(1500)]}]


def test_a_locked_store_is_gone_without(vllm: Vllm, alone: list[int], store_path: Path) -> None:
    geometry = flashkv.KVGeometry.opaque(4096)
    options = flashkv.Options(segment_bytes="4MiB", free_floor_bytes=0)
    with flashkv.open(store_path, capacity="64MiB", geometry=geometry, options=options):
        seen = vllm(store_path, rounds=2)
    assert [one["tokens"] for one in seen["rounds"]] == [[alone], [alone]]
    assert "lock" in seen["report"]["no_store_reason"]
    assert seen["report"]["store"] is None
    assert seen["report"]["blocks"]["stored"] == 0


def test_a_full_store_forgets(
    vllm: Vllm, alone: list[int], prompt: list[int], store_path: Path
) -> None:
    tier = {"capacity": "24MiB", "options": SMALL}
    prompts = [[(token * step) % 500 + 1 for token in prompt] for step in range(3, 31, 2)]
    seen = vllm(store_path, prompts=[prompt, *prompts, prompt], tier=tier, cpu_bytes=6 << 20)
    assert seen["rounds"][0]["tokens"][0] == seen["rounds"][0]["tokens"][-1] == alone
    assert seen["report"]["store"]["evicted_blocks"] > 0


def test_other_salts_and_settings_find_nothing(
    vllm: Vllm, alone: list[int], store_path: Path
) -> None:
    vllm(store_path)
    salted = vllm(store_path, tier={"salt": "tenant", "options": SMALL})
    assert salted["rounds"] == [{"tokens": [alone], "cached": [0]}]
    scaled = vllm(
        store_path,
        engine={"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e3}}},
    )
    assert scaled["rounds"][0]["cached"] == [0]
    assert scaled["rounds"][0]["tokens"] != [alone]
