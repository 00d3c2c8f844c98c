"""Mutation testing of the codecs' C: `./run mutate [--count N] [--seed S] [FILE...]`.

A sample of small faults (mutants.py), one at a time: is there a test that fails? Each is built into
a scratch folder from the objects of one full build; the codec's native tests run on it with -x.

Invariants
  - the tree is never written to: sources are changed in a copy, the tests load the copy's core;
  - a mutant is killed when a test fails, or the core crashes or hangs; what doesn't compile is not
    counted;
  - a run is repeated by its seed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from mutants import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[2]
ENGINE = "engine_native"
TIMEOUT_S = 240.0
KILLED, SURVIVED, UNBUILDABLE = "killed", "survived", "not compiled"
PARTS = (
    *("flashkv", "tools", "engine_native", "tests", "fio_profiles"),
    *("setup.py", "pyproject.toml", "README.md", "LICENSE"),
)
# Quick ones first: most mutants fall at once.
COMPILER = re.compile(r"(?:.*-)?(?:gcc|cc|clang)(?:-[0-9]+)?$")
TESTS = {
    "codec_fxp": ["tests/native/test_fxp_hostile.py", "tests/native/test_fxp.py"],
    "codec_bounded": ["tests/native/test_bounded_hostile.py", "tests/native/test_bounded.py"],
    "codec_prefix": ["tests/native/test_prefix_hostile.py", "tests/native/test_prefix.py"],
}


class Workshop:
    """A copy of the project whose core is compiled again after one source has changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for part in PARTS:
            if (ROOT / part).is_dir():
                # A developer's links of these two into the package are made anew below.
                links = ("tools", "fio_profiles") if part == "flashkv" else ()
                ignored = shutil.ignore_patterns("__pycache__", "*.so", *links)
                shutil.copytree(ROOT / part, folder / part, ignore=ignored)
            else:
                shutil.copy(ROOT / part, folder / part)
        (folder / "flashkv" / "tools").symlink_to("../tools")
        (folder / "flashkv" / "fio_profiles").symlink_to("../fio_profiles")
        self.commands = self._build()

    def _build(self) -> list[list[str]]:
        """Builds all once; returns the compiler's and linker's commands."""
        done = subprocess.run(
            [sys.executable, "setup.py", "build_ext", "--inplace", f"-j{os.cpu_count() or 1}"],
            cwd=self.folder,
            env={**os.environ, "FLASHKV_TEST_BUILD": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"the project doesn't build:\n{done.stdout}{done.stderr}")
        lines = [line.replace(" -O3 ", " -O1 ").split() for line in done.stdout.splitlines()]
        return [line for line in lines if line and COMPILER.match(Path(line[0]).name)]

    def rebuild(self, file: str) -> bool:
        """Compiles what includes the file, links the core; False where it doesn't compile."""
        for command in self.commands:
            if "-c" in command:
                source = Path(command[command.index("-c") + 1]).name
                if source != file and not self._includes(source, file):
                    continue
            done = subprocess.run(command, cwd=self.folder, capture_output=True, check=False)
            if done.returncode:
                return False
        return True

    def _includes(self, name: str, header: str) -> bool:
        path = self.folder / ENGINE / name
        return path.is_file() and f'#include "{header}"' in path.read_text(encoding="utf-8")

    def write(self, file: str, text: str) -> None:
        (self.folder / ENGINE / file).write_text(text, encoding="utf-8")

    def tests_fail(self, tests: list[str]) -> bool:
        """Whether one does: first with few examples of each property, then with all."""
        quick = ["-p", "quick_examples"]
        return self._run(tests, quick) or self._run(tests, [])

    def _run(self, tests: list[str], words: list[str]) -> bool:
        environment = {
            **os.environ,
            "PYTHONPATH": f"{self.folder}:{self.folder / 'tests' / 'mutation'}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "FLASHKV_SEED": "1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-p", "no:cacheprovider"]
        try:
            done = subprocess.run(
                [*command, *words, *tests],
                cwd=self.folder,
                env=environment,
                capture_output=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return True
        return done.returncode != 0


def tests_of(file: str) -> list[str]:
    """Tests of the codec that the file belongs to."""
    for stem, tests in TESTS.items():
        if file.startswith(stem):
            return [test for test in tests if (ROOT / test).is_file()]
    sys.exit(f"no tests are known for {file}")


def sample(files: list[str], count: int, seed: int) -> list[Mutant]:
    """`count` mutants, drawn from all of all files alike."""
    every = []
    for file in files:
        every += mutants_of(file, (ROOT / ENGINE / file).read_text(encoding="utf-8"))
    return random.Random(seed).sample(every, min(count, len(every)))


def judge(workshop: Workshop, mutant: Mutant) -> str:
    source = (ROOT / ENGINE / mutant.file).read_text(encoding="utf-8")
    workshop.write(mutant.file, mutant.apply(source))
    try:
        if not workshop.rebuild(mutant.file):
            return UNBUILDABLE
        return KILLED if workshop.tests_fail(tests_of(mutant.file)) else SURVIVED
    finally:
        workshop.write(mutant.file, source)
        # The next mutant may be of another file: this one's object must be whole again.
        workshop.rebuild(mutant.file)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Mutation testing of the codecs' C.")
    parser.add_argument("files", nargs="*", help="of engine_native; all of the codecs' by default")
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after that")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    files = given.files or sorted(
        path.name
        for path in (ROOT / ENGINE).glob("codec_*.[ch]")
        if path.name.startswith(tuple(TESTS))
    )
    chosen, verdicts = sample(files, given.count, given.seed), []
    end = time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory(prefix="flashkv-mutants-") as folder:
        workshop = Workshop(Path(folder))
        if any(workshop.tests_fail(tests_of(file)) for file in files[:1]):
            sys.exit("the tests fail without any mutant")
        for mutant in chosen:
            if time.monotonic() > end:
                break
            verdicts.append((mutant, judge(workshop, mutant)))
            print(f"{verdicts[-1][1]:12} {mutant}", flush=True)
    counts = Counter(verdict for _, verdict in verdicts)
    judged = counts[KILLED] + counts[SURVIVED]
    share = counts[KILLED] / judged if judged else 0.0
    print(f"seed {given.seed}: {counts[KILLED]} of {judged} killed, {100 * share:.1f} %")
    if given.json:
        rows = [{"mutant": str(mutant), "verdict": verdict} for mutant, verdict in verdicts]
        text = json.dumps({"seed": given.seed, "killed_share": share, "mutants": rows}, indent=2)
        given.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
