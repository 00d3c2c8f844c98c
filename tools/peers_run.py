"""flashkv-bench peers: other stores beside flashkv on one file system, in interleaved rounds.

Method and keys: docs/benchmarks.md.

Invariants
  - in a round all peers put the same blocks, then all get them, each time in a new order from a
    seed that is told: what disturbs the machine, or comes after a costly neighbour, strikes all;
  - a peer that can't be started or fails is named with the reason, and the others go on;
  - whatever happens, no process of a peer and no file of a store is left.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from .bench_io import settle
from .bench_sets import MIB, BenchError
from .demo_protocol import DemoError
from .machine import machine_facts
from .measure import Measurement
from .peers_blocks import KINDS, tokens_of
from .peers_protocol import Plan
from .peers_roster import ROSTER, command, hint, process_variables, why_not
from .peers_summary import summary
from .ttft_environments import linked_flashkv
from .ttft_session import Session

DEFAULT_SIZE_BYTES: Final = 6 << 30
BLOCK_BYTES: Final = (1 * MIB, 4 * MIB)
BATCH: Final = 16
ROUNDS: Final = 3
ROOM: Final = 1.5  # of the size, free on the file system: stores round up
DAMAGE_BLOCKS: Final = 16
DAMAGE_BATCH: Final = 4
DAMAGED: Final = 5

Step = Callable[[str], None]


@dataclass(frozen=True)
class PeersSettings:
    """One run of flashkv-bench peers.

    path          folder on the file system to measure.
    environments  folder with an environment of each engine, and with the libraries.
    size_bytes    of the blocks that lie on the disk at once, all peers' together.
    batch         blocks in a call, and in flight.
    kinds         of what is stored: "opaque" (random bytes), "bf16" (real keys and values).
    """

    path: Path
    environments: Path
    size_bytes: int = DEFAULT_SIZE_BYTES
    rounds: int = ROUNDS
    batch: int = BATCH
    block_bytes: tuple[int, ...] = BLOCK_BYTES
    kinds: tuple[str, ...] = KINDS
    peers: tuple[str, ...] = tuple(ROSTER)
    seed: int = 0

    def plans(self) -> dict[str, Plan]:
        """What each peer stores, by the case's name. Raises BenchError."""
        share = self.size_bytes // len(self.peers)
        made: dict[str, Plan] = {}
        for block_bytes in self.block_bytes:
            try:
                tokens_of(block_bytes)
            except ValueError as error:
                raise BenchError(str(error)) from None
            count = share // block_bytes
            if not count:
                raise BenchError(
                    f"{self.size_bytes} bytes for {len(self.peers)} peers are less than a block of"
                    f" {block_bytes} bytes each"
                )
            for kind in self.kinds:
                plan = Plan(kind, block_bytes, min(self.batch, count), count)
                made[f"{kind} {block_bytes / MIB:g} MiB"] = plan
        return made


@dataclass
class Outcome:
    """All that a run found out, by peer."""

    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    puts: dict[str, dict[str, list[Measurement]]] = field(default_factory=dict)
    gets: dict[str, dict[str, list[Measurement]]] = field(default_factory=dict)
    disk_bytes: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    damage: dict[str, dict[str, Any]] = field(default_factory=dict)
    restart: dict[str, dict[str, Any]] = field(default_factory=dict)
    order: list[dict[str, Any]] = field(default_factory=list)


def peers_steps(settings: PeersSettings) -> int:
    """How often run_peers() calls step()."""
    cases = len(settings.block_bytes) * len(settings.kinds)
    return len(settings.peers) * (1 + 2 * cases * settings.rounds + 2)


def run_peers(settings: PeersSettings, step: Step) -> dict[str, Any]:
    """Runs all rounds. Raises BenchError where nothing could be measured."""
    plans = settings.plans()
    if shutil.disk_usage(settings.path).free < ROOM * settings.size_bytes:
        raise BenchError(f"less than {ROOM} times {settings.size_bytes} bytes are free here")
    folder = Path(tempfile.mkdtemp(prefix="flashkv-bench-", dir=settings.path)).resolve()
    with ExitStack() as ends:
        ends.callback(shutil.rmtree, folder, ignore_errors=True)
        run = _Run(settings, plans, folder, step)
        ends.callback(run.end)
        machine = machine_facts(folder)
        run.start()
        run.rounds()
        run.probes()
    return {
        **summary(run.outcome, plans),
        "settings": {
            "size_bytes": settings.size_bytes,
            "rounds": settings.rounds,
            "seed": settings.seed,
            "peers": list(settings.peers),
            "cases": {case: asdict(plan) for case, plan in plans.items()},
        },
        "machine": machine,
    }


class _Run:
    def __init__(
        self, settings: PeersSettings, plans: dict[str, Plan], folder: Path, step: Step
    ) -> None:
        self.settings = settings
        self.plans = plans
        self.folder = folder
        self.step = step
        self.outcome = Outcome()
        self._sessions: dict[str, Session] = {}
        self._random = random.Random(settings.seed)
        self._links = folder / "packages"

    def start(self) -> None:
        """A process of each peer; who can't be started is left out."""
        linked_flashkv(self._links)
        for name in self.settings.peers:
            reason = why_not(name, self.settings.environments)
            if reason:
                self.outcome.left_out[name] = reason
            else:
                self._sessions[name] = self._session(name)
        for name in self.settings.peers:
            self.step(f"starting {name}")
            if name not in self._sessions:
                continue
            try:
                facts = self._sessions[name].ready()
                facts["in_flight"] = facts["in_flight"] or self.settings.batch
                self.outcome.facts[name] = facts
            except DemoError as error:
                reason = _one_line(name, error) + hint(name, self.settings.environments)
                self.outcome.left_out[name] = reason
                self._sessions.pop(name).end()
        if not self._sessions:
            told = "; ".join(f"{name}: {why}" for name, why in self.outcome.left_out.items())
            raise BenchError(f"no peer could be started: {told}")

    def rounds(self) -> None:
        """All puts of a case, then all its gets, then all is deleted."""
        for number in range(self.settings.rounds):
            for case, plan in self.plans.items():
                for what, one in (("put", self._put), ("get", self._get)):
                    order = list(self.settings.peers)
                    self._random.shuffle(order)
                    told = {"round": number, "case": case, "pass": what, "peers": order}
                    self.outcome.order.append(told)
                    for name in order:
                        self.step(f"{number + 1}: {what} {case}, {name}")
                        if name in self._sessions:
                            self._guarded(name, one, case, plan)
                for name in self.settings.peers:
                    self._remove(name)

    def probes(self) -> None:
        """Damage and restarts, one peer after the other."""
        # The kind that comes last is the one that codecs work on.
        kind, block_bytes = self.settings.kinds[-1], min(self.settings.block_bytes)
        damage = Plan(kind, block_bytes, DAMAGE_BATCH, DAMAGE_BLOCKS)
        restart = Plan(kind, block_bytes, self.settings.batch, self.settings.batch)
        for name in self.settings.peers:
            self.step(f"damage, {name}")
            if name in self._sessions:
                self._guarded(name, self._damage, "", damage)
                self._remove(name)
            self.step(f"restart, {name}")
            if name in self._sessions:
                self._guarded(name, self._restart, "", restart)
                self._remove(name)

    def end(self) -> None:
        """Ends all processes."""
        for session in self._sessions.values():
            session.end()
        self._sessions.clear()

    # ---- one peer ----------------------------------------------------------------------------

    def _put(self, name: str, case: str, plan: Plan) -> None:
        settle(self.folder)
        done = self._ask(name, "put", store=case, plan=asdict(plan), flush=True)
        self._measured(self.outcome.puts, name, case, done, plan)
        if self.outcome.facts[name]["index_in_memory"]:
            self._ask(name, "drop", store=case)
        else:
            self._ask(name, "close", store=case)
        held = self.outcome.disk_bytes.setdefault(case, {}).setdefault(name, [])
        held.append(disk_bytes(self._kept(name)))

    def _get(self, name: str, case: str, plan: Plan) -> None:
        done = self._ask(name, "get", store=case, plan=asdict(plan))
        self._ask(name, "close", store=case)
        if done["right"] != plan.count:
            raise BenchError(
                f"of {plan.count} blocks {done['missing']} did not come back, and"
                f" {done['wrong']} came with other bytes"
            )
        self._measured(self.outcome.gets, name, case, done, plan)

    def _damage(self, name: str, _case: str, plan: Plan) -> None:
        """Puts a few blocks, changes a byte of one on the disk, and reads them one by one."""
        given = asdict(plan)
        self._ask(name, "put", store="damage", plan=given, flush=True)
        if not self.outcome.facts[name]["index_in_memory"]:
            self._ask(name, "close", store="damage")
        at = self._ask(name, "damage", store="damage", plan=given, number=DAMAGED)["at"]
        try:
            seen = self._ask(name, "check", store="damage", plan=given)
        except (BenchError, DemoError) as error:
            told = {"verdict": "error", "at": at, "blocks": [], "raised": _one_line(name, error)}
            self.outcome.damage[name] = told
            if isinstance(error, DemoError):
                self._restarted(name)  # it took the process with it
            return
        self._ask(name, "close", store="damage")
        self.outcome.damage[name] = {"verdict": verdict(seen), "at": at, **seen}

    def _restart(self, name: str, _case: str, plan: Plan) -> None:
        """Three stores: closed, killed after a flush, killed without one. Then a new process."""
        given = asdict(plan)
        lives = {"closed": True, "killed_after_flush": True}
        if self.outcome.facts[name]["flushes"]:
            lives["killed_before_flush"] = False
        for life, flush in lives.items():
            self._ask(name, "put", store=life, plan=given, flush=flush)
        self._ask(name, "close", store="closed")
        self._restarted(name)
        found: dict[str, Any] = {"blocks": plan.count}
        for life in lives:
            found[life], problem = self._came_back(name, life, given)
            if problem:
                found[f"{life}_problem"] = problem
        self.outcome.restart[name] = found

    def _came_back(self, name: str, life: str, plan: dict[str, Any]) -> tuple[int, str]:
        """How many blocks of a store are right, and what is wrong with the others."""
        try:
            seen = self._ask(name, "check", store=life, plan=plan)
            self._ask(name, "close", store=life)
        except BenchError as error:
            return 0, str(error)
        wrong = seen["blocks"].count("wrong")
        problem = seen["raised"] or (f"{wrong} with other bytes" if wrong else "")
        return seen["blocks"].count("right"), problem

    def _restarted(self, name: str) -> None:
        """Kills a peer's process and starts another."""
        self._sessions[name].kill()
        self._sessions.pop(name).end()
        self._sessions[name] = self._session(name)
        self._sessions[name].ready()

    def _guarded(
        self, name: str, one: Callable[[str, str, Plan], None], case: str, plan: Plan
    ) -> None:
        """What a peer does; who fails is out for the rest, and named."""
        try:
            one(name, case, plan)
        except (BenchError, DemoError) as error:
            where = f"{case or one.__name__.strip('_')}: "
            self.outcome.failed[name] = where + _one_line(name, error)
            if name in self._sessions:
                self._sessions.pop(name).end()
            self._remove(name)

    def _session(self, name: str) -> Session:
        file = self.folder / f"{name}.json"
        given = {"entry": asdict(ROSTER[name]), "folder": str(self._kept(name))}
        file.write_text(json.dumps(given), encoding="utf-8")
        environments = self.settings.environments
        return Session(
            name,
            command(name, file, environments),
            process_variables(name, self._links, environments),
        )

    def _ask(self, name: str, do: str, **given: Any) -> dict[str, Any]:
        """A command's answer. Raises BenchError with what the peer raised, DemoError if it died."""
        done = self._sessions[name].ask({"do": do, **given})
        if "problem" in done:
            raise BenchError(f"{do}: {done['problem']}")
        return done

    def _measured(
        self,
        kept: dict[str, dict[str, list[Measurement]]],
        name: str,
        case: str,
        done: dict[str, Any],
        plan: Plan,
    ) -> None:
        one = Measurement(done["bytes"], plan.count, done["seconds"], done["cpu_s"])
        kept.setdefault(case, {}).setdefault(name, []).append(one)

    def _kept(self, name: str) -> Path:
        return self.folder / "stores" / name

    def _remove(self, name: str) -> None:
        shutil.rmtree(self._kept(name), ignore_errors=True)


def verdict(seen: Mapping[str, Any]) -> str:
    """What a peer made of damage to one of its blocks, from what came of each when it was read.

    "wrong bytes": it gave them out. "noticed": it did not give them out, and told by a miss or an
    error. "error": it can't be read at all any more. "not reached": all came as they were put.
    """
    blocks = seen["blocks"]
    if "wrong" in blocks:
        return "wrong bytes"
    if blocks.count("right") == len(blocks):
        return "not reached"
    return "error" if blocks.count("raised") == len(blocks) else "noticed"


def disk_bytes(folder: Path) -> int:
    """What the files of a folder take on the disk, reserved blocks included."""
    return sum(path.lstat().st_blocks * 512 for path in _files(folder))


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _one_line(name: str, error: Exception) -> str:
    """Of an error's text what tells most: a traceback's last line."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    first = lines[0].removeprefix(name).removeprefix(":").strip()
    return first.rstrip(":") if len(lines) == 1 else f"{first} {lines[-1]}"
