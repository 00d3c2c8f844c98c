"""Mutation testing of the codecs' C: `./run mutate [--count N] [--seed S] [FILE...]`.

A sample of small faults (mutants.py), one at a time: is there a test that fails? Each is built into
a copy of the project (workshop.py); the codec's tests run on it, quickest first, until one fails.

Invariants
  - before the first mutant: tests pass on a copy where nothing was changed, and fail on one where
    every function of a file stops the process, for each file that is drawn from;
  - a mutant is killed when a test fails, or the core crashes or hangs; what doesn't compile, what
    compiles to the same code and what is listed in equivalent.txt is not counted;
  - a run is repeated by its seed, with any number of workers.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).resolve().parent))
from equivalents import change_of, listed, place_of
from mutants import Mutant, mutants_of
from workshop import ALL_EXAMPLES, ENGINE, QUICK_EXAMPLES, ROOT, Workshop, how

KILLED, SURVIVED, UNBUILDABLE = "killed", "survived", "not compiled"
EQUIVALENT, SAME_CODE = "equivalent", "same code"
HALVES = "tests/native/test_halves.py"
FXP = ["tests/native/test_fxp_hostile.py", "tests/native/test_fxp.py"]
BOUNDED = ["tests/native/test_bounded_hostile.py", "tests/native/test_bounded.py"]
PREFIX = [
    "tests/native/test_prefix_hostile.py",
    "tests/native/test_prefix_parameters.py",
    "tests/native/test_prefix.py",
]
# The longest name that a file begins with.
TESTS = {
    "codec_fxp": [*FXP, HALVES],
    "codec_bounded": BOUNDED,
    "codec_prefix": [*PREFIX, HALVES],
    "codec_prefix_planes": [*PREFIX, *BOUNDED],
    "codec_values": [*FXP, *PREFIX],
    "codec_delta": ["tests/native/test_delta.py"],
    "codec_halves": [HALVES],
    "codec_zstd": ["tests/native/test_zstd.py"],
}
STORES = ["tests/native/test_stream_choice.py"]


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    name: str
    reason: str = ""


def tests_of(file: str) -> list[str]:
    """Tests of the codec that the file belongs to."""
    stems = [stem for stem in TESTS if file.startswith(stem)]
    if not stems:
        sys.exit(f"no tests are known for {file}")
    return [*TESTS[max(stems, key=len)], *STORES]


def runs_here(file: str) -> bool:
    """Whether this processor has the instructions that the file is for."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    return "avx512" not in file or {"avx512bw", "avx512dq", "avx512vl"} <= set(flags)


def source_of(file: str) -> str:
    return (ROOT / ENGINE / file).read_text(encoding="utf-8")


def sample(files: list[str], count: int, seed: int) -> list[Mutant]:
    """`count` mutants, drawn from all of all files alike."""
    every = []
    for file in files:
        every += mutants_of(file, source_of(file))
    return random.Random(seed).sample(every, min(count, len(every)))


def survivors_of(file: Path) -> list[Mutant]:
    """Of an earlier run, with the sources as they were."""
    rows = json.loads(file.read_text(encoding="utf-8"))["mutants"]
    return [Mutant(**row["mutant"]) for row in rows if row["verdict"] == SURVIVED]


def sabotaged(source: str) -> str:
    """Every function stops the process."""
    return re.sub(r"^\{$", "{ __builtin_trap();", source, flags=re.MULTILINE)


def prove(workshop: Workshop, files: list[str]) -> None:
    """That the tests pass on the whole core, and that each file's tests notice a broken one."""
    tests = sorted({test for file in files for test in tests_of(file)})
    for examples, properties_only in ((QUICK_EXAMPLES, False), (ALL_EXAMPLES, True)):
        trial = workshop.tried(tests, examples, properties_only)
        if not trial.passed:
            sys.exit(f"the tests fail without any mutant ({how(trial)}):\n{workshop.log()}")
        for test, seconds in trial.seconds.items():
            workshop.seconds[test] = max(seconds, workshop.seconds.get(test, 0.0))
    for file in files:
        source = source_of(file)
        if sabotaged(source) == source:
            print(f"{file} has no function: not proved that its tests use it", flush=True)
            continue
        with workshop.changed(file, sabotaged(source)) as made:
            if made != "core":
                sys.exit(f"{file} with functions that stop the process: {made}")
            if workshop.tried(tests_of(file), QUICK_EXAMPLES).passed:
                sys.exit(f"tests pass though every function of {file} stops the process")


def judge(workshop: Workshop, mutant: Mutant, known: dict[tuple[str, str], str]) -> Verdict:
    source = source_of(mutant.file)
    reason = known.get((place_of(mutant, source), change_of(mutant, source)))
    if reason:
        return Verdict(mutant, EQUIVALENT, reason)
    with workshop.changed(mutant.file, mutant.apply(source)) as made:
        if made == "not compiled":
            return Verdict(mutant, UNBUILDABLE)
        if made == "same code":
            return Verdict(mutant, SAME_CODE)
        trial = workshop.verdict(tests_of(mutant.file))
    return Verdict(mutant, SURVIVED) if trial.passed else Verdict(mutant, KILLED, how(trial))


@contextmanager
def workshops(count: int, files: list[str]) -> Iterator[list[Workshop]]:
    """Copies of the project that are proved to be good for something."""
    with tempfile.TemporaryDirectory(prefix="flashkv-mutants-") as folder:
        open_ones = [Workshop(Path(folder) / "0")]
        try:
            prove(open_ones[0], files)
            for number in range(1, count):
                open_ones.append(Workshop(Path(folder) / str(number), open_ones[0]))
                open_ones[-1].seconds = open_ones[0].seconds
            yield open_ones
        finally:
            for workshop in open_ones:
                workshop.close()


def verdicts_of(mutants: list[Mutant], workers: int, end: float) -> Iterator[Verdict]:
    """In the mutants' order; none is begun after `end`."""
    known = listed()
    with workshops(workers, sorted({mutant.file for mutant in mutants})) as free_ones:
        free: SimpleQueue[Workshop] = SimpleQueue()
        for workshop in free_ones:
            free.put(workshop)

        def one(mutant: Mutant) -> Verdict | None:
            if time.monotonic() > end:
                return None
            workshop = free.get()
            try:
                return judge(workshop, mutant, known)
            finally:
                free.put(workshop)

        with ThreadPoolExecutor(workers) as pool:
            for verdict in pool.map(one, mutants):
                if verdict:
                    yield verdict


def report(verdicts: list[Verdict], seed: int, seconds: float) -> float:
    """Prints who survived and how many did; the share of the killed."""
    counts = Counter(verdict.name for verdict in verdicts)
    survivors = [verdict.mutant for verdict in verdicts if verdict.name == SURVIVED]
    if survivors:
        print(
            "\nno test fails with (as equivalent.txt takes them, where they can change no result):"
        )
    for mutant in survivors:
        source = source_of(mutant.file)
        print(f"{place_of(mutant, source)}\n    {change_of(mutant, source)}: line {mutant.line}")
    judged = counts[KILLED] + counts[SURVIVED]
    share = counts[KILLED] / judged if judged else 0.0
    others = ", ".join(f"{counts[name]} {name}" for name in (EQUIVALENT, SAME_CODE, UNBUILDABLE))
    print(
        f"\nseed {seed}: {counts[KILLED]} of {judged} killed, {100 * share:.1f} %; {others}; "
        f"{seconds / max(1, len(verdicts)):.1f} s a mutant"
    )
    return share


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Mutation testing of the codecs' C.")
    parser.add_argument("files", nargs="*", help="of engine_native; all of the codecs' by default")
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2, help="processes that test (2)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after that")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--again", type=Path, help="only what survived the run that wrote this JSON"
    )
    given = parser.parse_args(arguments)
    files = given.files or sorted(
        path.name
        for path in (ROOT / ENGINE).glob("codec_*.[ch]")
        if path.name.startswith(tuple(TESTS)) and runs_here(path.name)
    )
    chosen = survivors_of(given.again) if given.again else sample(files, given.count, given.seed)
    verdicts: list[Verdict] = []
    begin = proved = time.monotonic()
    for verdict in verdicts_of(chosen, given.workers, begin + given.seconds):
        if not verdicts:
            proved = time.monotonic()
        verdicts.append(verdict)
        print(f"{verdict.name:12} {verdict.mutant}  {verdict.reason}".rstrip(), flush=True)
    share = report(verdicts, given.seed, time.monotonic() - proved)
    if given.json:
        rows = [
            {"mutant": asdict(each.mutant), "verdict": each.name, "reason": each.reason}
            for each in verdicts
        ]
        text = json.dumps({"seed": given.seed, "killed_share": share, "mutants": rows}, indent=2)
        given.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
