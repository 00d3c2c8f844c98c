"""A copy of the project whose core is compiled again, in seconds, after one source has changed.

Invariants
  - the tree is never written to: sources are changed in the copy, and its tests load its core;
  - the core that tests load is the one that was linked last, and not the whole one: its digest goes
    with each trial;
  - after a trial the copy's sources and objects are whole again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trials import NOT_LOADED, OTHER_CORE

ROOT = Path(__file__).resolve().parents[2]
ENGINE = "engine_native"
PARTS = (
    *("flashkv", "tools", "engine_native", "tests", "fio_profiles"),
    *("setup.py", "pyproject.toml", "README.md", "LICENSE"),
)
COMPILER = re.compile(r"(?:.*-)?(?:gcc|cc|clang)(?:-[0-9]+)?$")
CORE = "flashkv/_native.abi3.so"
QUICK_EXAMPLES, ALL_EXAMPLES = 25, 100


@dataclass(frozen=True)
class Trial:
    """What tests said of a core."""

    code: int
    signal: int
    test: str
    seconds: dict[str, float]

    @property
    def passed(self) -> bool:
        return self.code == 0

    @property
    def nothing_ran(self) -> bool:
        return self.code == 5


class Workshop:
    """One copy, and the process that tests it."""

    def __init__(self, folder: Path, like: Workshop | None = None) -> None:
        """Copies and builds the project; or copies `like`, which has done so."""
        self.folder = folder
        self.seconds: dict[str, float] = {}
        if like:
            shutil.copytree(like.folder, folder, symlinks=True)
            self.commands, self.link, self.whole = like.commands, like.link, like.whole
        else:
            self._copy()
            self.commands, self.link = self._build()
            if not self.linked():
                sys.exit("the core can't be linked")
            self.whole = self.digest()
        environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"},
            "PYTHONPATH": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "FLASHKV_SEED": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_PLUGINS": "_hypothesis_pytestplugin,pytest_timeout",
        }
        self.process = subprocess.Popen(
            [sys.executable, "tests/mutation/trials.py"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _copy(self) -> None:
        for part in PARTS:
            if (ROOT / part).is_dir():
                # A developer's links of these two into the package are made anew below.
                links = ("tools", "fio_profiles") if part == "flashkv" else ()
                ignored = shutil.ignore_patterns("__pycache__", "*.so", *links)
                shutil.copytree(ROOT / part, self.folder / part, ignore=ignored)
            else:
                shutil.copy(ROOT / part, self.folder / part)
        (self.folder / "flashkv" / "tools").symlink_to("../tools")
        (self.folder / "flashkv" / "fio_profiles").symlink_to("../fio_profiles")

    def _build(self) -> tuple[dict[str, list[str]], list[str]]:
        """Builds all once, little optimised; each source's command, and the linker's."""
        recipe = self.folder / ENGINE / "build.py"
        text = recipe.read_text(encoding="utf-8")
        recipe.write_text(text.replace('"-O3"', '"-O1"').replace('"-g"', '"-g0"'), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "setup.py", "build_ext", "--inplace"],
            cwd=self.folder,
            env={**os.environ, "FLASHKV_TEST_BUILD": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"the project doesn't build:\n{done.stdout}{done.stderr}")
        lines = [line.split() for line in done.stdout.splitlines()]
        lines = [line for line in lines if line and COMPILER.match(Path(line[0]).name)]
        commands = {Path(_after(line, "-c")).name: line for line in lines if "-c" in line}
        (link,) = [line for line in lines if "-c" not in line]
        # setuptools links in build/ and copies from there; tests load the copy.
        link[link.index("-o") + 1] = CORE
        return commands, link

    def _objects_of(self, file: str) -> list[str]:
        """Sources that include the file, whatever lies between."""
        found, seen = [file], {file}
        for name in found:
            for path in sorted((self.folder / ENGINE).glob("*.[ch]")):
                if path.name in seen:
                    continue
                if f'#include "{name}"' in path.read_text(encoding="utf-8"):
                    seen.add(path.name)
                    found.append(path.name)
        return [name for name in found if name in self.commands]

    def _object(self, source: str) -> Path:
        return self.folder / _after(self.commands[source], "-o")

    @contextmanager
    def changed(self, file: str, text: str) -> Iterator[str]:
        """The copy with other text in a file; yields "core", "same code" or "not compiled"."""
        path, sources = self.folder / ENGINE / file, self._objects_of(file)
        whole = path.read_text(encoding="utf-8")
        objects = {source: self._object(source).read_bytes() for source in sources}
        path.write_text(text, encoding="utf-8")
        try:
            yield self._made(objects)
        finally:
            path.write_text(whole, encoding="utf-8")
            for source, content in objects.items():
                self._object(source).write_bytes(content)

    def _made(self, objects: dict[str, bytes]) -> str:
        for source in objects:
            if not self._runs(self.commands[source]):
                return "not compiled"
        if all(self._object(source).read_bytes() == content for source, content in objects.items()):
            return "same code"
        if not self.linked():
            return "not compiled"
        if self.digest() == self.whole:
            sys.exit(f"the core in {self.folder} is the whole one, though its objects changed")
        return "core"

    def linked(self) -> bool:
        """Links the objects as they are."""
        (self.folder / CORE).unlink(missing_ok=True)
        return self._runs(self.link)

    def digest(self) -> str:
        """SHA-256 of the core."""
        return hashlib.sha256((self.folder / CORE).read_bytes()).hexdigest()

    def _runs(self, command: list[str]) -> bool:
        return (
            subprocess.run(command, cwd=self.folder, capture_output=True, check=False).returncode
            == 0
        )

    def tried(self, tests: list[str], examples: int, properties_only: bool = False) -> Trial:
        """Tests on the core that was linked last, until one fails."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = {
            "tests": tests,
            "examples": examples,
            "properties_only": properties_only,
            "seconds": self.seconds,
            "core": self.digest(),
        }
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        reply: dict[str, Any] = json.loads(self.process.stdout.readline())
        if reply["code"] == OTHER_CORE:
            sys.exit(f"the tests in {self.folder} load another core than the one that was built")
        return Trial(**reply)

    def verdict(self, tests: list[str]) -> Trial:
        """With few examples of each property; then properties alone, with all."""
        quick = self.tried(tests, QUICK_EXAMPLES)
        if not quick.passed:
            return quick
        thorough = self.tried(tests, ALL_EXAMPLES, properties_only=True)
        return quick if thorough.nothing_ran else thorough

    def log(self) -> str:
        """What the last trial printed."""
        return (self.folder / "trial.log").read_text(encoding="utf-8", errors="replace")


def _after(command: list[str], word: str) -> str:
    return command[command.index(word) + 1]


def how(trial: Trial) -> str:
    """In a few words, why a core is no good."""
    name = trial.test.split("::")[-1][:60]
    if trial.code == NOT_LOADED:
        return "can't be loaded"
    if trial.signal:
        reason = "hangs" if trial.signal == signal.SIGPROF else f"signal {trial.signal}"
        return f"{reason} in {name}" if name else reason
    return name or f"pytest's status {trial.code}"
