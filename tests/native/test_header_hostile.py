"""The header parser under sanitizers: asan_header.c with headers of real records."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from flashkv.tools.inspection import StoreView
from store_support import ROOT, open_store

from flashkv import Identity, KVGeometry

SOURCES = ("record.c", "layout.c", "crc32c.c", "cpu.c")
SHAPES = [
    (KVGeometry.gqa(3, 2, 64, "bfloat16"), "lossless", 16),
    (KVGeometry.mla(2, 100, 20, "float16"), "lossless", 7),
    (KVGeometry.gqa(1, 1, 20, "float32"), "lossless", 40),
    (KVGeometry.gqa(2, 2, 64, "bfloat16"), "raw", 16),
    (KVGeometry.opaque(500), "raw", 1),
]


def write_headers(path: Path, folder: Path) -> None:
    """One file of the headers of small stores, each after its length."""
    with path.open("wb") as file:
        for number, (geometry, codec, tokens) in enumerate(SHAPES):
            keys = [f"{number}-{i}".encode() * (1 + i % 9) for i in range(30)]
            size = geometry.block_bytes(0, tokens)
            data = np.random.default_rng(number).integers(0, 70, (30, size)).astype(np.uint8)
            with open_store(folder / str(number), geometry, codec=codec) as store:
                namespace = store.namespace(Identity(model="m"))
                assert namespace.put(keys[:3], data[:3], tokens=tokens).all_ok
                assert namespace.put(keys[3:], data[3:], tokens=tokens, parents=keys[2:-1]).all_ok
            for segment in StoreView(folder / str(number)).segments.values():
                for walked in segment.walked:
                    file.write(len(walked.view.data).to_bytes(4, "little") + walked.view.data)


def test_header_parser_under_sanitizers(tmp_path: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    flags = ["-std=gnu11", "-O1", "-g", "-fsanitize=address,undefined"]
    flags += ["-fno-sanitize-recover=all", "-D_GNU_SOURCE", f"-I{ROOT / 'engine_native'}"]
    probe = tmp_path / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    built = subprocess.run(
        [compiler, *flags, str(probe), "-o", str(tmp_path / "probe")],
        check=False,
        capture_output=True,
    )
    if built.returncode or subprocess.run([str(tmp_path / "probe")], check=False).returncode:
        pytest.skip("the compiler has no address and undefined-behaviour sanitizers")
    headers, program = tmp_path / "headers", tmp_path / "asan_header"
    write_headers(headers, tmp_path)
    sources = [str(ROOT / "engine_native" / name) for name in SOURCES]
    sources.append(str(ROOT / "tests" / "native" / "asan_header.c"))
    subprocess.run([compiler, *flags, *sources, "-o", str(program)], check=True)
    done = subprocess.run(
        [str(program), str(headers), "1", "30000"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout.split()[0]) > 1000, "many are accepted, so the checks behind are met"
