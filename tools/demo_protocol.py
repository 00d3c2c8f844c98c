"""How the demo and its worker processes talk.

Invariants
 - a worker writes one JSON object a line to its standard output: {"progress": text} while it
   works, {"step": text} when a step of the bar is done, at the end {"result": {...}} or
   {"error": text};
 - whatever a worker's libraries print goes to its standard error, shown only when it fails;
 - a worker never outlives run_worker().
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

WORKER = "flashkv.tools.demo_worker"


class DemoError(Exception):
    """The demo can't go on; the message says why."""


def emit(**line: Any) -> None:
    """A worker's line to its parent."""
    print(json.dumps(line), flush=True)


def run_worker(
    role: str,
    settings: dict[str, Any],
    on_progress: Callable[[str], None],
    on_step: Callable[[str], None],
    worker: str = WORKER,
) -> dict[str, Any]:
    """Runs a role of a worker's module in a new process and returns its result.

    Raises DemoError.
    """
    environment = {
        **os.environ,
        # Spinning threads on busy cores make torch many times slower.
        "OMP_WAIT_POLICY": "passive",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        command = [sys.executable, "-m", worker, role]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
        try:
            result, error = _follow(process, json.dumps(settings), on_progress, on_step)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        if error:
            raise DemoError(error)
        if result is None or process.returncode != 0:
            errors.seek(0)
            tail = "".join(errors.readlines()[-20:]).strip()
            raise DemoError(f"the process {role!r} ended with {process.returncode}:\n{tail}")
        return result


def _follow(
    worker: subprocess.Popen[str],
    settings: str,
    on_progress: Callable[[str], None],
    on_step: Callable[[str], None],
) -> tuple[dict[str, Any] | None, str]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(settings)
        worker.stdin.close()
    except BrokenPipeError:
        pass  # it ended at once: its standard error says why
    result: dict[str, Any] | None = None
    error = ""
    for text in worker.stdout:
        try:
            line = json.loads(text)
        except ValueError:
            continue  # a library's own print
        if not isinstance(line, dict):
            continue
        if "progress" in line:
            on_progress(line["progress"])
        elif "step" in line:
            on_step(line["step"])
        elif "error" in line:
            error = line["error"]
        elif "result" in line:
            result = line["result"]
    worker.wait()
    return result, error
