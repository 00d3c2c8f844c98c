"""vLLM with flashkv's connector, on a tiny model: the same tokens as vLLM alone, fewer computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import flashkv

Generated = dict[str, Any]


def generate(*prompts: Any, tokens: int = 16, keep: bool = False) -> dict[str, Any]:
    """A step that generates; a prompt is a list of ids, or those and a salt."""
    told = [
        {"ids": prompt[0], "salt": prompt[1]} if isinstance(prompt, tuple) else {"ids": prompt}
        for prompt in prompts
    ]
    return {"do": "generate", "prompts": told, "tokens": tokens, "keep": keep}


REPORT = {"do": "report"}


class Vllm:
    """Runs of vLLM, and what vLLM alone says to the same prompts."""

    def __init__(self, run_engine: Any, model: Path, known: dict[str, list[int]]) -> None:
        self._run_engine, self._model, self._known = run_engine, model, known

    def run(self, store: Path | None, *steps: dict[str, Any], **more: Any) -> list[Any]:
        given = {"store": None if store is None else str(store), "steps": steps, **more}
        results: list[Any] = self._run_engine("vllm", "vllm_run.py", self._model, json.dumps(given))
        return results

    def alone(self, *prompts: list[int], tokens: int = 16) -> list[list[int]]:
        """What vLLM alone generates; asked once for each prompt and length."""
        names = [json.dumps([prompt, tokens]) for prompt in prompts]
        missing = [i for i, name in enumerate(names) if name not in self._known]
        if missing:
            step = generate(*(prompts[i] for i in missing), tokens=tokens)
            (result,) = self.run(None, step, engine={"enable_prefix_caching": False})
            for i, said in zip(missing, result["tokens"], strict=True):
                self._known[names[i]] = said
        return [self._known[name] for name in names]


@pytest.fixture(scope="module")
def known() -> dict[str, list[int]]:
    return {}


@pytest.fixture
def vllm(run_engine: Any, tiny_model: Path, known: dict[str, list[int]]) -> Vllm:
    return Vllm(run_engine, tiny_model, known)


def counts(report: Any, half: str = "worker") -> dict[str, int]:
    found: dict[str, int] = report[half]["counts"]
    return found


@pytest.mark.parametrize(("block_size", "loads"), [(32, "layerwise"), (128, "between_steps")])
def test_a_restart(
    vllm: Vllm, tmp_path: Path, prompt: list[int], block_size: int, loads: str
) -> None:
    """Chunked prefill, two salts, common prefixes in one step, generated tokens, a restart."""
    store = tmp_path / "kv"
    other = [*prompt[:700], *reversed(prompt[700:1000])]
    long = generate(prompt, tokens=80)
    together = generate(prompt, other, prompt[:900], tokens=80)
    said = vllm.alone(prompt, other, prompt[:900], tokens=80)
    setup: dict[str, Any] = {
        "engine": {"block_size": block_size, "max_num_batched_tokens": 512},
        "settings": {"loads": loads, "layer_groups": 3},
    }
    first, again, both, report = vllm.run(store, long, long, together, REPORT, **setup)
    assert first["tokens"] == again["tokens"] == said[:1]
    assert both["tokens"] == said
    assert first["cached"] == [0]
    # vLLM computes the last token again: of 1,500 tokens 23 granules are loaded.
    assert again["cached"] == [1472]
    assert both["cached"][0] == 1472
    assert min(both["cached"][1:]) >= 640
    # The others share blocks with the first one, in the step that loads them.
    assert counts(report)["loaded_tokens"] == 2 * 1472
    assert report["worker"]["layout"] in ("split", "transposed")  # the kernel was asked
    assert report["worker"]["loads"] == loads

    answer = [*prompt, *said[0], 7, 8, 9]
    salted = generate((prompt, "tenant"), tokens=80)
    turn = generate(answer, tokens=80)
    short, rest = generate(prompt[:100]), generate(prompt, tokens=80, keep=True)
    steps = (together, salted, salted, turn, short, rest)
    *results, report = vllm.run(store, *steps, REPORT, **setup)
    restarted, new, old, next_turn, begun, went_on = results
    assert restarted["tokens"] == said
    assert restarted["cached"][0] == 1472
    assert min(restarted["cached"][1:]) >= 640
    assert new["tokens"] == old["tokens"] == said[:1]
    assert new["cached"] == [0]  # nothing of the unsalted prompt
    assert old["cached"] == [1472]
    assert next_turn["tokens"] == vllm.alone(answer, tokens=80)
    assert next_turn["cached"] == [1536]  # generated tokens were stored too
    assert begun["tokens"] == vllm.alone(prompt[:100])
    # Blocks of 32: vLLM has the first 96 tokens itself, and the load begins within a granule.
    assert went_on["tokens"] == said[:1]
    assert went_on["cached"] == [1472]
    assert report["worker"]["events"] == {}


def test_failing_loads_are_computed(vllm: Vllm, tmp_path: Path, prompt: list[int]) -> None:
    store = tmp_path / "kv"
    other = [*prompt[:700], *reversed(prompt[700:1000])]
    fail = {"do": "fail", "rows": [3, 11], "times": 4}
    both = generate(prompt, other)
    for loads in ("layerwise", "between_steps"):
        first, _, failed, after, report = vllm.run(
            store,
            both,
            fail,
            both,
            both,
            REPORT,
            engine={"block_size": 32},
            settings={"loads": loads, "layer_groups": 2},
        )
        assert first["tokens"] == failed["tokens"] == after["tokens"] == vllm.alone(prompt, other)
        found = counts(report)
        assert found["failed_tokens"] >= 64
        assert found["loaded_tokens"] > 1472
        assert after["cached"][0] == 1472
        assert list(report["worker"]["events"]) == ["get_io_error"]


def test_damage(vllm: Vllm, tmp_path: Path, prompt: list[int]) -> None:
    """Segments whose bits flip under an open store, then one that is opened with them."""
    store = tmp_path / "kv"
    step, said = generate(prompt), vllm.alone(prompt)
    first, flipped, damaged, stored_again, report = vllm.run(
        store, step, {"do": "damage"}, step, step, REPORT
    )
    assert first["tokens"] == damaged["tokens"] == stored_again["tokens"] == said
    assert flipped["flipped"] > 20
    assert counts(report)["failed_tokens"] > 0
    assert stored_again["cached"] == [1472]
    vllm.run(store, step)
    flip, restarted, again, report = vllm.run(store, {"do": "damage"}, step, step, REPORT)
    assert flip["flipped"] > 20
    assert restarted["tokens"] == again["tokens"] == said
    assert again["cached"] == [1472]


def test_preemption(vllm: Vllm, tmp_path: Path, prompt: list[int]) -> None:
    """Room for 1,280 tokens, and three requests that grow to 480 each."""
    prompts = [prompt[first : first + 380] for first in (0, 400, 800)]
    step = generate(*prompts, tokens=100)
    small = {"block_size": 32, "num_gpu_blocks_override": 40, "max_model_len": 1024}
    first, again, report = vllm.run(tmp_path / "kv", step, step, REPORT, engine=small)
    said = vllm.alone(*prompts, tokens=100)
    assert first["tokens"] == again["tokens"] == said
    assert report["preemptions"] > 0
    # All prompts, and a preempted one again: what it had generated, too.
    assert counts(report)["loaded_tokens"] > 3 * 320


def test_speculation(vllm: Vllm, tmp_path: Path, prompt: list[int]) -> None:
    """Drafts that are not accepted are computed beside the others; none is stored."""
    pattern = (prompt[:40] * 10)[:390]
    drafts = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 2}
    store, engine = tmp_path / "kv", {"block_size": 32, "speculative_config": drafts}
    (said,) = vllm.alone(pattern, tokens=150)
    answer = [*pattern, *said, 5, 6]
    first, turn, report = vllm.run(
        store, generate(pattern, tokens=150), generate(answer), REPORT, engine=engine
    )
    assert first["tokens"] == [said]
    assert turn["tokens"] == vllm.alone(answer)
    assert turn["cached"] == [512]  # 390 + 150 tokens: 8 granules
    assert counts(report)["saved_tokens"] >= 512
    assert report["drafts"] > 0
    (plain,) = vllm.run(store, generate(answer))
    assert plain["tokens"] == turn["tokens"]
    assert plain["cached"] == [512]


def test_stores_that_can_not_be_used(vllm: Vllm, tmp_path: Path, prompt: list[int]) -> None:
    """Locked by another process, then full: vLLM goes on."""
    said, step = vllm.alone(prompt), generate(prompt)
    geometry = flashkv.KVGeometry.gqa(2, 2, 64, "bfloat16")  # another model's store, too
    with flashkv.open(tmp_path / "kv", capacity="64MiB", geometry=geometry):
        alone, report = vllm.run(tmp_path / "kv", step, REPORT)
    assert alone["tokens"] == said
    assert alone["cached"] == [0]
    assert not report["scheduler"]["store"]
    assert "is open for writing in another process" in report["worker"]["reason"]
    full = {"options": {"free_floor_bytes": 1 << 50}}
    first, again, report = vllm.run(tmp_path / "full", step, step, REPORT, settings=full)
    assert first["tokens"] == again["tokens"] == said
    assert again["cached"] == [0]
    assert counts(report)["unsaved_tokens"] > 0
    assert list(report["worker"]["events"]) == ["put_no_space"]


def test_what_transformers_stored(
    vllm: Vllm, tmp_path: Path, tiny_model: Path, prompt: list[int]
) -> None:
    """One checkpoint, two engines, one store: either loads what the other computed."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from flashkv.connectors.transformers import PrefixCache, kv_geometry

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    store, other = tmp_path / "kv", prompt[::-1]
    with flashkv.open(store, capacity="256MiB", geometry=kv_geometry(model)) as opened:
        prefix = PrefixCache(opened, model, checkpoint=tiny_model)
        ids = torch.tensor([prompt])
        cache, restored = prefix.restore(ids)
        assert restored == 0
        with torch.no_grad():
            model(ids, cache=cache)
        assert prefix.save(cache, ids).stored == 23
    first, second, _ = vllm.run(
        store, generate(prompt), generate(other), REPORT, engine={"block_size": 128}
    )
    assert first["cached"] == [1472]
    assert first["tokens"] == vllm.alone(prompt)
    with flashkv.open(store) as opened:
        prefix = PrefixCache(opened, model, checkpoint=tiny_model)
        ids = torch.tensor([other])
        cache, restored = prefix.restore(ids)
        assert restored == 1472
        with torch.no_grad():
            logits = model(ids[:, restored:], cache=cache).logits
        assert int(logits[0, -1].argmax()) == second["tokens"][0][0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_workers_in_processes_of_their_own(
    vllm: Vllm, tmp_path: Path, prompt: list[int], ranks: int
) -> None:
    store, said = tmp_path / "kv", vllm.alone(prompt)
    apart = {"distributed_executor_backend": "mp", "tensor_parallel_size": ranks}
    # Workers may be killed at the end: what is to be found again must be durable before.
    wait = {"do": "wait", "seconds": 4}
    first, again, _ = vllm.run(store, generate(prompt), generate(prompt), wait, engine=apart)
    assert first["tokens"] == again["tokens"] == said
    assert again["cached"] == [1472]
    (restarted,) = vllm.run(store, generate(prompt), engine=apart)
    assert restarted["tokens"] == said
    assert restarted["cached"] == [1472]


def test_a_changed_interface_is_told_in_words(run_engine: Any) -> None:
    told = run_engine("vllm", "vllm_interface.py")
    assert told["as it is"] == ""
    for name, said in (
        ("other parameters", "get_num_new_matched_tokens(self, request, computed)"),
        ("a method less", "has no KVConnectorBase_V1.on_new_request"),
        ("a name less", "KVConnectorHandshakeMetadata"),
    ):
        assert told[name].startswith("EngineInterfaceError: the plug-in interface of vLLM")
        assert said in told[name]
        assert "tested with 0.32.0" in told[name]
