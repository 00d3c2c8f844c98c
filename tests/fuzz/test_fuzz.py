"""Every decoder under libFuzzer and sanitizers; what failed once is run again each time.

FLASHKV_FUZZ_SECONDS sets how long each target is fuzzed: 30 in the ordinary run, 1,800 in the soak.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import fuzzing  # noqa: E402

SECONDS = os.environ.get("FLASHKV_FUZZ_SECONDS")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def programs(kind: str) -> dict[str, Path]:
    try:
        return fuzzing.build(kind)
    except fuzzing.CantBuildError as error:
        pytest.skip(str(error))


def test_every_target_has_a_corpus() -> None:
    size = 0
    for target in fuzzing.TARGETS:
        files = fuzzing.inputs(target)
        assert len(files) >= 3, target
        size += sum(file.stat().st_size for file in files)
    assert size < 1 << 20
    folders = {path.name for kind in ("corpus", "crashers") for path in (HERE / kind).iterdir()}
    assert folders <= set(fuzzing.TARGETS)


@pytest.mark.parametrize("target", fuzzing.TARGETS)
def test_corpus_and_its_ruins(target: str, seed: int) -> None:
    """Needs no libFuzzer: corpus and crashers as they are, then harmed at random."""
    program = programs("standalone")[target]
    files = fuzzing.inputs(target)
    print(f"seed {seed}")
    rounds = 3000 if target in ("page", "scan", "roundtrip") else 20000
    command = [str(program), str(seed), str(rounds), *map(str, files)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=fuzzing.ENVIRONMENT, check=False
    )
    assert done.returncode == 0, f"again: {' '.join(command[:3])} FILES\n{done.stderr[-8000:]}"
    assert done.stdout == f"{len(files)} files, {rounds} rounds\n"


@pytest.mark.parametrize("target", fuzzing.TARGETS)
def test_fuzz(target: str, seed: int, tmp_path: Path) -> None:
    program = programs("libfuzzer")[target]
    print(f"seed {seed}")
    assert not fuzzing.replay(program, fuzzing.inputs(target))
    report = fuzzing.fuzz(target, program, float(SECONDS or 30), seed, tmp_path / "found")
    assert not report, report


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("target", fuzzing.TARGETS)
def test_fuzz_for_long(target: str, seed: int) -> None:
    program = programs("libfuzzer")[target]
    print(f"seed {seed}")
    found = fuzzing.BUILD / "found" / target  # kept: the next soak goes on from here
    report = fuzzing.fuzz(target, program, float(SECONDS or 1800), seed, found)
    assert not report, report


def test_a_failure_is_found_kept_and_named(tmp_path: Path, seed: int) -> None:
    """The whole way that a failure takes, with a target that fails."""
    try:
        compiler, compile_, link = fuzzing.toolchain("libfuzzer")
    except fuzzing.CantBuildError as error:
        pytest.skip(str(error))
    source, program = tmp_path / "bad.c", tmp_path / "bad"
    source.write_text(
        '#include "fuzz.h"\n'
        "int LLVMFuzzerTestOneInput(const uint8_t *d, size_t n)\n"
        "{ uint8_t *m = copied(d, n); int bad = n > 2 && d[0] == 'F' && m[n + (d[1] == 'K') - 1];\n"
        "give_back(m, n); return bad && d[2] == 0 ? 0 : 0; }\n"
    )
    flags = [*fuzzing.FLAGS, *compile_, *link, f"-I{fuzzing.ENGINE}", f"-I{HERE}"]
    subprocess.run([compiler, *flags, str(source), "-o", str(program)], check=True)
    report = fuzzing.fuzz("bad", program, 60, seed, tmp_path / "found")
    assert "heap-buffer-overflow" in report
    kept = next(line for line in report.splitlines() if line.startswith("the input: "))
    path = Path(kept.removeprefix("the input: "))
    assert path.parent == fuzzing.BUILD
    assert f"again: ./run fuzz bad --input {path}" in report
    assert fuzzing.replay(program, [path])
    path.unlink()
