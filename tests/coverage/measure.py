"""`./run coverage`: the tests under coverage.py and gcov; fails below the limits.

    measure.py [PYTEST ARGUMENT...]     default: all but the slow ones

Invariants
  - the core that is measured is a build of its own (build/coverage), with nothing optimised away;
    the installed one stays as it is;
  - a limit is on branches: those of flashkv/, and those of engine_native/ without the simulated
    device. tools/ is measured and has no limit;
  - what is left out is left out by a pattern here or in pyproject.toml, with its reason.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "coverage"
PYTHON_BRANCHES_MIN = 95.0
C_BRANCHES_MIN = 90.0
FAST = ["-m", "not slow and not soak and not gpu and not engines"]

NOT_MEASURED = [
    "io_sim.c",  # the simulated device is a test's own
    "sim_.*",
    "allocate.c",  # empty but in test builds
    "format_check.c",  # for the compiler only
]
# The failing side of an assertion is there to be unreachable.
UNREACHABLE = r".*\bassert\("


def run(*command: object, **environment: str) -> int:
    return subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env={**os.environ, **environment},
        check=False,
    ).returncode


def build() -> None:
    """Compiles what changed, and forgets earlier counts."""
    BUILD.mkdir(parents=True, exist_ok=True)
    status = run(
        *(sys.executable, "engine_native/build.py"),
        FLASHKV_COVERAGE="1",
        FLASHKV_TEST_BUILD="1",
    )
    if status:
        sys.exit("the core could not be built")
    for counts in BUILD.rglob("*.gcda"):
        counts.unlink()
    shutil.rmtree(BUILD / "python", ignore_errors=True)
    (BUILD / "python").mkdir()


def test(arguments: list[str]) -> int:
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    shared = ["-n", os.environ.get("FLASHKV_TEST_PROCESSES", "auto"), "--dist", "worksteal"]
    return run(
        *(sys.executable, "-m", "coverage", "run", "-m", "pytest", *shared, *FAST, *arguments),
        PYTHONPATH=path,
        OMP_NUM_THREADS="1",
    )


def percent(part: int, whole: int) -> float:
    return 100.0 * part / whole if whole else 100.0


def python_branches() -> dict[str, tuple[int, int]]:
    """(covered, all) branches below flashkv/ and tools/; writes the list of what is missing."""
    report = BUILD / "python.json"
    run(sys.executable, "-m", "coverage", "combine", "--quiet")
    if run(sys.executable, "-m", "coverage", "json", "--quiet", "-o", report):
        sys.exit("coverage.py has no data")
    files = json.loads(report.read_text(encoding="utf-8"))["files"]
    totals = {"flashkv": (0, 0), "tools": (0, 0)}
    lines = []
    for name, file in sorted(files.items()):
        summary, top = file["summary"], name.split("/")[0]
        covered, total = totals[top]
        totals[top] = (covered + summary["covered_branches"], total + summary["num_branches"])
        lines += [f"{name}:{start}: never goes to {end}" for start, end in file["missing_branches"]]
        lines += [f"{name}:{line}: never reached" for line in file["missing_lines"]]
    (BUILD / "python.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return totals


def c_branches() -> tuple[int, int]:
    """(covered, all) branches of engine_native/; writes the list of what is missing."""
    report = BUILD / "c.json"
    command = [sys.executable, "-m", "gcovr", "--root", ROOT, "-j", "2"]
    command += ["--filter", r"engine_native/"]
    command += [word for name in NOT_MEASURED for word in ("--exclude", rf"engine_native/{name}")]
    command += ["--exclude-branches-by-pattern", UNREACHABLE]
    # Loops over bytes run billions of times; gcovr takes such counts for a fault of gcov.
    command += ["--gcov-suspicious-hits-threshold", "0"]
    command += ["--json", report, "--txt", BUILD / "c-files.txt"]
    command.append(BUILD / "objects" / "engine_native")
    if run(*command):
        sys.exit("gcovr failed")
    covered = total = 0
    lines = []
    for file in json.loads(report.read_text(encoding="utf-8"))["files"]:
        for line in file["lines"]:
            branches = [b for b in line["branches"] if not b.get("gcovr/excluded")]
            total += len(branches)
            covered += sum(b["count"] > 0 for b in branches)
            where = f"{file['file']}:{line['line_number']}"
            if line["count"] == 0 and not line.get("gcovr/excluded"):
                lines.append(f"{where}: never reached")
            elif missing := [str(i) for i, b in enumerate(branches) if b["count"] == 0]:
                lines.append(f"{where}: never takes branch {', '.join(missing)}")
    (BUILD / "c.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return covered, total


def main() -> int:
    build()
    status = test(sys.argv[1:])
    totals = python_branches()
    rows = [
        ("flashkv/", *totals["flashkv"], PYTHON_BRANCHES_MIN),
        ("tools/", *totals["tools"], 0.0),
        ("engine_native/", *c_branches(), C_BRANCHES_MIN),
    ]
    for name, covered, total, least in rows:
        share = percent(covered, total)
        verdict = "" if share >= least else f"  below the limit of {least:.0f} %"
        print(f"{name:15} {share:6.2f} % of {total} branches{verdict}")
        status = status or int(share < least)
    print(f"what is missing: {BUILD / 'python.txt'}, {BUILD / 'c.txt'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
