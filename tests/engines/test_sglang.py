"""SGLang with its hierarchical cache on flashkv: real runs on a CPU with a tiny float32 model, and
the storage interface on real host pools.

Every run must say what SGLang alone says, token for token; what it finds cached after its own
caches were emptied, or after a restart, came from flashkv.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_support import ROOT

import flashkv

HERE = Path(__file__).resolve().parent
PAGE = 64
VOCABULARY = 512
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE, HERE / "sglang_stubs"))),
    "SGLANG_USE_CPU_ENGINE": "1",
}
Engine = Callable[..., list[dict[str, Any]]]


def whole_pages(prompt: list[int]) -> int:
    """Tokens that can come from the cache: the last one is always computed."""
    return (len(prompt) - 1) // PAGE * PAGE


def other_prompt(prompt: list[int], number: int, shared: int = 0) -> list[int]:
    """A prompt that begins like `prompt` and goes on differently."""
    rest = [(token * 31 + 7 * number) % (VOCABULARY - 3) + 1 for token in prompt[shared:]]
    return prompt[:shared] + rest


@pytest.fixture
def engine(run_engine: Callable[..., Any], tiny_model: Path) -> Engine:
    """Runs SGLang: an answer a prompt. path: of flashkv's store; None: SGLang alone."""

    def run(
        prompts: list[list[int]],
        path: Path | None = None,
        *,
        layout: str = "page_first_direct",
        v1: int = 1,
        environment: dict[str, str] | None = None,
        arguments: dict[str, Any] | None = None,
        **extra: Any,
    ) -> list[dict[str, Any]]:
        job: dict[str, Any] = {
            "model": str(tiny_model),
            "prompts": prompts,
            "layout": layout,
            "arguments": arguments or {},
        }
        if path is not None:
            job["extra"] = {"path": str(path), "capacity": "1GiB", "interface_v1": v1, **extra}
        answers: list[dict[str, Any]] = run_engine(
            "sglang", "sglang_run.py", json.dumps(job), **ENVIRONMENT, **(environment or {})
        )
        return answers

    return run


@pytest.fixture(scope="module")
def alone() -> dict[tuple[int, ...], list[int]]:
    """What SGLang alone said to each prompt."""
    return {}


@pytest.fixture
def expect(
    engine: Engine, alone: dict[tuple[int, ...], list[int]]
) -> Callable[[list[list[int]]], list[list[int]]]:
    """SGLang's own answers to prompts, each asked once."""

    def answers(prompts: list[list[int]]) -> list[list[int]]:
        new = [prompt for prompt in prompts if tuple(prompt) not in alone]
        if new:
            for prompt, said in zip(new, engine(new), strict=True):
                alone[tuple(prompt)] = said["tokens"]
        return [alone[tuple(prompt)] for prompt in prompts]

    return answers


@pytest.fixture
def prompts(prompt: list[int]) -> list[list[int]]:
    """Six: the first, and others that share 320 tokens with it."""
    return [prompt, *(other_prompt(prompt, number, 320) for number in range(1, 6))]


def from_storage(answer: dict[str, Any]) -> int:
    """Tokens that came from the storage."""
    details = answer["details"] or {}
    if details.get("storage"):
        assert details["storage_backend"] in {"FlashKVStorage", "HiCacheStorageFailureInjector"}
    return int(details.get("storage", 0))


def test_host_pools(run_engine: Callable[..., Any], tiny_model: Path) -> None:
    """The interface on real pools: sglang_checks.py says which checks there are."""
    ended = run_engine("sglang", "sglang_checks.py", tiny_model, **ENVIRONMENT)
    assert len(ended) >= 22
    failed = {name: told for name, told in ended.items() if told is not None}
    assert not failed, "\n".join(failed.values())


def test_layouts_interfaces_and_restarts(
    engine: Engine, expect: Any, prompts: list[list[int]], tmp_path: Path
) -> None:
    """Four processes on one store, each with another layout and interface: each restores what the
    ones before stored, and stores a prompt that only it has computed.
    """
    first, *others = prompts
    wanted = expect(prompts)
    path = tmp_path / "store"
    known = [first]
    assert engine([first], path)[0] == {
        "tokens": wanted[0], "cached": 0, "details": None, "seconds": pytest.approx(0, abs=300)
    }  # fmt: skip
    for number, (layout, v1) in enumerate(
        [
            ("layer_first", 0),
            ("page_first_direct", 1),
            ("page_first_direct", 0),
            ("layer_first", 1),
        ]
    ):
        mine = others[number]
        answers = engine([*known, mine, mine], path, layout=layout, v1=v1)
        told = [answer["tokens"] for answer in answers]
        assert told == [*wanted[: len(known)], wanted[number + 1], wanted[number + 1]]
        restored = [from_storage(answer) for answer in answers]
        assert restored[:-2] == [whole_pages(first)] * len(known), (layout, v1)
        assert restored[-2:] == [320, whole_pages(first)], (layout, v1)
        known.append(mine)


def test_faults_of_the_storage(
    engine: Engine, expect: Any, prompts: list[list[int]], tmp_path: Path
) -> None:
    """SGLang's own injector lets half of the calls fail."""
    asked = [prompts[0], prompts[0], prompts[1], prompts[1], prompts[0], prompts[2]]
    answers = engine(
        asked,
        tmp_path / "store",
        environment={"SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.5"},
    )
    assert [answer["tokens"] for answer in answers] == expect(asked)


def test_two_ranks(engine: Engine, expect: Any, prompts: list[list[int]], tmp_path: Path) -> None:
    """Tensor parallelism: each rank has one of the two KV heads, in a store of its own."""
    path = tmp_path / "store"
    answers = engine(
        [prompts[0], prompts[0]],
        path,
        arguments={"tp_size": 2},
        environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1" if (os.cpu_count() or 1) > 1 else "0|0"},
    )
    assert [answer["tokens"] for answer in answers] == expect([prompts[0]] * 2)
    assert [from_storage(answer) for answer in answers] == [0, whole_pages(prompts[0])]
    assert sorted(folder.name for folder in path.iterdir()) == ["tp0of2", "tp1of2"]
    parts = []
    for folder in path.iterdir():
        with flashkv.open(folder, read_only=True) as store:
            assert store.stats().blocks == whole_pages(prompts[0]) // PAGE
            parts.append(store.geometry.groups[0].planes[0].heads)
    assert parts == [1, 1]


def test_a_locked_store(
    engine: Engine,
    expect: Any,
    prompts: list[list[int]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "store"
    with flashkv.open(path, capacity="64MiB", geometry=flashkv.KVGeometry.opaque(4096)):
        answers = engine([prompts[0], prompts[0]], path)
    assert [answer["tokens"] for answer in answers] == expect([prompts[0]] * 2)
    assert [from_storage(answer) for answer in answers] == [0, 0]
    assert capfd.readouterr().out.count("goes on without the flashkv store") == 1


def test_a_full_store(
    engine: Engine, expect: Any, prompts: list[list[int]], tmp_path: Path
) -> None:
    """3 MB a prompt, and room for about four of them: the oldest go, the newest are there."""
    path = tmp_path / "store"
    asked = [*prompts, prompts[-1]]
    answers = engine(asked, path, capacity="20MiB", codec="raw")
    assert [answer["tokens"] for answer in answers] == expect(asked)
    again = engine(asked[::-1], path, capacity="20MiB", codec="raw")
    assert [answer["tokens"] for answer in again] == expect(asked[::-1])
    assert from_storage(answers[-1]) > 0
    used = sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file())
    assert used <= 20 << 20


def test_damage_and_other_meanings(
    engine: Engine, expect: Any, prompts: list[list[int]], tmp_path: Path
) -> None:
    """Another salt finds nothing; damaged pages are computed again, and then they are back."""
    path = tmp_path / "store"
    wanted = expect(prompts[:1])[0]
    assert engine(prompts[:1], path)[0]["tokens"] == wanted
    salted = engine(prompts[:1], path, salt="another tenant")[0]
    assert salted["tokens"] == wanted
    assert salted["cached"] == 0
    damage(path)
    answers = engine([prompts[0], prompts[0]], path)
    assert [answer["tokens"] for answer in answers] == [wanted] * 2
    assert from_storage(answers[0]) < whole_pages(prompts[0])
    assert from_storage(answers[1]) == whole_pages(prompts[0])


def damage(path: Path) -> None:
    """Overwrites some bytes of every MiB of the segments."""
    segments = list((path / "shards/0/segments").iterdir())
    assert segments
    for segment in segments:
        data = bytearray(segment.read_bytes())
        for at in range(3 * 4096, len(data), 1 << 20):
            data[at : at + 600] = bytes(byte ^ 0xFF for byte in data[at : at + 600])
        segment.write_bytes(data)
