"""Runs fio with the profiles of fio_profiles/ and reads its JSON.

Invariants
  - the access patterns are those of the profiles; a caller changes sizes, engine and paths only by
    naming the options;
  - fio's processor time is its job's, set-up excluded: usr_cpu and sys_cpu are shares of
    job_runtime;
  - anything but a clean end of fio raises FioError with fio's own words.
"""

from __future__ import annotations

import configparser
import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .measure import Measurement

PROFILES = Path(__file__).resolve().parent.parent / "fio_profiles"
"""Beside this package's folder, in the sources and where it is installed."""
TIMEOUT_S = 1800
GLOBAL = "global"


class FioError(RuntimeError):
    """fio is missing, failed, or said something that is not its JSON."""


def fio_path() -> str | None:
    """The fio command, or None where it isn't installed."""
    return shutil.which("fio")


def fio_version() -> str | None:
    """For example "fio-3.33"; None where fio isn't installed."""
    command = fio_path()
    if command is None:
        return None
    return subprocess.run(
        [command, "--version"], capture_output=True, text=True, check=True, timeout=30
    ).stdout.strip()


def load_profile(name: str) -> configparser.ConfigParser:
    """A profile by its name without ".fio". Raises FioError if there is none."""
    profile = configparser.ConfigParser(
        delimiters=("=",),
        comment_prefixes=(";", "#"),
        allow_no_value=True,
        interpolation=None,
        default_section="\0",
        strict=False,
    )
    profile.optionxform = str  # type: ignore[assignment, method-assign]
    try:
        profile.read_string((PROFILES / f"{name}.fio").read_text(encoding="utf-8"))
    except OSError as error:
        known = ", ".join(sorted(path.stem for path in PROFILES.glob("*.fio")))
        raise FioError(f"no fio profile {name!r} in {PROFILES} (known: {known})") from error
    return profile


def job_text(name: str, overrides: Mapping[str, str | int]) -> str:
    """The profile as a job file with `overrides` in every job."""
    profile = load_profile(name)
    lines: list[str] = []
    for section in profile.sections():
        options: dict[str, str | None] = dict(profile[section])
        if section != GLOBAL:
            options.update({key: str(value) for key, value in overrides.items()})
        lines.append(f"[{section}]")
        lines += [key if value is None else f"{key}={value}" for key, value in options.items()]
    return "\n".join(lines) + "\n"


def parse_output(text: str) -> dict[str, Any]:
    """The JSON that fio prints, which warnings may precede. Raises FioError."""
    begin = text.find("{")
    try:
        parsed = json.loads(text[begin:]) if begin >= 0 else None
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict) or not parsed.get("jobs"):
        raise FioError(f"fio printed no JSON of jobs: {text.strip()[:500]!r}")
    return parsed


def measurement(output: Mapping[str, Any], direction: str) -> Measurement:
    """What the first job of parse_output() did. direction: "read" or "write". Raises FioError."""
    job = output["jobs"][0]
    if job.get("error"):
        raise FioError(f"fio's job {job.get('jobname')!r} ended with errno {job['error']}")
    done = job[direction]
    runtime_s = done["runtime"] / 1000
    if done["io_bytes"] <= 0 or runtime_s <= 0:
        raise FioError(f"fio's job {job.get('jobname')!r} did no {direction} that could be timed")
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return Measurement(done["io_bytes"], done["total_ios"], runtime_s, cpu_s)


def run_profile(
    name: str, directory: Path, direction: str, overrides: Mapping[str, str | int] | None = None
) -> Measurement:
    """Runs a profile in `directory` and waits for it. Raises FioError."""
    command = fio_path()
    if command is None:
        raise FioError("fio is not installed: apt-get install fio (./run bench does it)")
    job = job_text(name, {"directory": str(directory), **(overrides or {})})
    # "-": the job file comes by standard input.
    try:
        finished = subprocess.run(
            [command, "--output-format=json", "-"],
            input=job,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise FioError(f"fio took more than {TIMEOUT_S} s for the profile {name!r}") from error
    if finished.returncode:
        said = (finished.stderr + finished.stdout).strip()
        raise FioError(f"fio ended with {finished.returncode} for {name!r}: {said[:500]}")
    return measurement(parse_output(finished.stdout), direction)
