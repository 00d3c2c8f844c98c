"""Builds and runs the fuzz targets: the decoders of the data plane, straight from their sources.

Invariants
  - a build is named by what it was made from (sources, flags, compiler), so it is made once and is
    never stale; sources are compiled once, with sanitizers, and linked to each target;
  - what libFuzzer finds goes to build/fuzz, never into the tree: `crashers/TARGET` and
    `corpus/TARGET` are what was put there by hand;
  - without libFuzzer the same targets are built for a driver of our own (standalone.c).

`./run fuzz [TARGET [SECONDS]]` is main() below; --merge adds to the corpus what covers more.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "fuzz"
ENGINE = ROOT / "engine_native"
TARGETS = tuple(sorted(path.stem.removeprefix("fuzz_") for path in HERE.glob("fuzz_*.c")))
PACKAGES = "clang libclang-rt-dev"
INPUT_BYTES_MAX = 1 << 16
CORPUS_BYTES_MAX = 8 << 10  # of one file
SANITIZE = "address,undefined"
FLAGS = ["-std=gnu11", "-D_GNU_SOURCE", "-O1", "-g", "-fno-omit-frame-pointer", "-pthread"]
FLAGS += ["-ffp-contract=off"]  # as build.py
ENVIRONMENT = {
    **os.environ,
    "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


class CantBuildError(Exception):
    """There is no compiler that can build the targets; the text says what is missing."""


@cache
def toolchain(kind: str) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """(compiler, flags to compile, flags to link). kind: "libfuzzer" or "standalone".

    Raises CantBuildError.
    """
    names = ["clang"] if kind == "libfuzzer" else ["gcc", "clang", "cc"]
    for name in names:
        compiler = shutil.which(name)
        if compiler is None:
            continue
        compile_ = [f"-fsanitize={SANITIZE}", "-fno-sanitize-recover=all"]
        link = [f"-fsanitize={SANITIZE}"]
        if kind == "libfuzzer":
            compile_[0] += ",fuzzer-no-link"
            link[0] += ",fuzzer"
        with tempfile.TemporaryDirectory() as folder:
            source, program = Path(folder, "probe.c"), Path(folder, "probe")
            entry = "LLVMFuzzerTestOneInput(const char *d, unsigned long n) { return d && n > 9; }"
            if kind != "libfuzzer":
                entry = "main(void) { return 0; }"
            source.write_text(f"int {entry}\n")
            command = [compiler, *link, str(source), "-o", str(program)]
            made = subprocess.run(command, capture_output=True, check=False).returncode == 0
            if made:
                command = [str(program), "-runs=1"]
                made = subprocess.run(command, capture_output=True, check=False).returncode == 0
            if made:
                return compiler, tuple(compile_), tuple(link)
    if kind == "libfuzzer":
        raise CantBuildError(f"no clang with libFuzzer and sanitizers: apt-get install {PACKAGES}")
    raise CantBuildError("no C compiler with sanitizers: apt-get install gcc")


def _fingerprint(command: list[str]) -> str:
    digest = hashlib.sha256("\0".join(command).encode())
    sources = [*ENGINE.glob("*.[ch]"), *HERE.glob("*.[ch]")]
    for path in sorted(sources):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def build(kind: str = "libfuzzer") -> dict[str, Path]:
    """The programs of all targets. Raises CantBuildError."""
    compiler, compile_, link = toolchain(kind)
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    command = [compiler, *FLAGS, *compile_, f"-I{ENGINE}", f"-I{HERE}"]
    folder = BUILD / f"{kind}-{_fingerprint([*command, *link, version.stdout])}"
    programs = {target: folder / target for target in TARGETS}
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:  # of the processes that share the tests one builds
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all(program.exists() for program in programs.values()):
            _build(kind, folder, programs, command, [compiler, *FLAGS, *link])
    return programs


def _build(
    kind: str, folder: Path, programs: dict[str, Path], command: list[str], linker: list[str]
) -> None:
    """Makes the programs, in place of those of other sources."""
    for stale in BUILD.glob(f"{kind}-*"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
        sources = [*ENGINE.glob("*.c"), *HERE.glob("*.c")]
        if kind == "libfuzzer":
            sources.remove(HERE / "standalone.c")
        objects = {p: str(Path(scratch, f"{p.parent.name}-{p.stem}.o")) for p in sources}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda p: _run([*command, "-c", str(p), "-o", objects[p]]), sources))
            archive = str(Path(scratch, "engine.a"))  # of it a target takes what it calls
            _run(["ar", "rcs", archive, *(objects[p] for p in sources if p.parent == ENGINE)])
            own = [objects[p] for p in sources if p.parent == HERE and p.stem == "standalone"]
            memory = objects[HERE / "memory_engine.c"]

            def link_target(target: str) -> None:
                mine = objects[HERE / f"fuzz_{target}.c"]
                needs = [mine, *own, *([memory] if target in ("page", "scan") else [])]
                program = str(Path(scratch, target))
                _run([*linker, *needs, archive, "-lm", "-o", program])

            list(pool.map(link_target, TARGETS))
        folder.mkdir(parents=True, exist_ok=True)
        for target, program in programs.items():
            Path(scratch, target).replace(program)


def inputs(target: str) -> list[Path]:
    """The corpus and the crashers of a target."""
    folders = (HERE / "corpus" / target, HERE / "crashers" / target)
    return sorted(path for folder in folders if folder.is_dir() for path in folder.iterdir())


def replay(program: Path, files: list[Path]) -> str:
    """Runs each file once; the output, empty where all is well."""
    if not files:
        return "there is nothing to replay"  # libFuzzer would begin to fuzz
    command = [str(program), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    return "" if done.returncode == 0 else done.stdout[-2000:] + done.stderr[-8000:]


def fuzz_command(target: str, program: Path, seconds: float, seed: int, found: Path) -> list[str]:
    """found: folder for inputs that cover something new."""
    found.mkdir(parents=True, exist_ok=True)
    folders = [HERE / "corpus" / target, HERE / "crashers" / target]
    return [
        str(program),
        f"-max_total_time={max(1, round(seconds))}",
        f"-seed={seed % (1 << 32) or 1}",
        f"-max_len={INPUT_BYTES_MAX}",
        "-timeout=25",
        "-rss_limit_mb=2048",
        "-print_final_stats=1",
        f"-artifact_prefix={BUILD}/{target}-",
        str(found),
        *(str(folder) for folder in folders if folder.is_dir()),
    ]


def fuzz(target: str, program: Path, seconds: float, seed: int, found: Path) -> str:
    """Runs it; what to do about the failure, and the output's end, or the empty text."""
    command = fuzz_command(target, program, seconds, seed, found)
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    for line in done.stderr.splitlines()[-12:]:
        if "DONE" in line or line.startswith("stat::average"):
            print(f"{target}: {line}")
    if done.returncode == 0:
        return ""
    return f"{target}, seed {seed}\n{artifact_of(done.stderr)}\n{done.stderr[-8000:]}"


def artifact_of(output: str) -> str:
    """Where libFuzzer wrote the input that failed, and how to run it again; else empty."""
    match = re.search(r"Test unit written to (\S+)", output)
    if not match:
        return ""
    target = Path(match[1]).name.split("-")[0]
    return f"the input: {match[1]}\nagain: ./run fuzz {target} --input {match[1]}"


def merge(target: str, program: Path, found: list[Path]) -> None:
    """The smallest corpus with the coverage of the present one and of what was found."""
    corpus = HERE / "corpus" / target
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        # By edges alone, not by how often each is taken: a tenth of the files.
        command = [str(program), "-merge=1", "-use_counters=0", f"-max_len={INPUT_BYTES_MAX}"]
        command += [folder, str(corpus)]
        _run([*command, *(str(path) for path in found if path.is_dir())])
        shutil.rmtree(corpus)
        corpus.mkdir(parents=True)
        for path in Path(folder).iterdir():
            if path.stat().st_size <= CORPUS_BYTES_MAX:
                shutil.copy(path, corpus / path.name[:16])


def main() -> int:
    """The job `./run fuzz`."""
    parser = argparse.ArgumentParser(prog="./run fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("target", nargs="?", choices=TARGETS, help="one decoder (all)")
    parser.add_argument("seconds", nargs="?", type=float, default=60, help="for each target (60)")
    parser.add_argument("--input", type=Path, help="run this file once instead")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--merge", action="store_true", help="add to the corpus what covers more")
    options = parser.parse_args()
    try:
        programs = build()
    except CantBuildError as error:
        print(f"fuzz: {error}", file=sys.stderr)
        return 2
    verdict = 0
    for target in [options.target] if options.target else TARGETS:
        found = BUILD / "found" / target
        if options.input is not None:
            command = [str(programs[target]), str(options.input)]
        elif options.merge:
            merge(target, programs[target], [found])
            continue
        else:
            command = fuzz_command(target, programs[target], options.seconds, options.seed, found)
        print(f"==> {target}, seed {options.seed}", file=sys.stderr, flush=True)
        verdict |= subprocess.run(command, env=ENVIRONMENT, check=False).returncode != 0
    return verdict


if __name__ == "__main__":
    sys.exit(main())
