"""The process that tests/crash/test_sigkill.py kills: it puts, flushes, deletes, and says so.

Arguments: store, backend, seed, first new key, version. Standard input: one line, the stored keys.
Each line that it prints is whole before the next call begins: a pipe takes it at once or not.
"""

from __future__ import annotations

import random
import sys

import numpy as np
from store_support import GQA, IDENTITY, open_store

TOKENS = 16
PUTS = 40
"""Of one life, so that a long one doesn't fill the store."""


def key_of(number: int) -> bytes:
    return number.to_bytes(4, "little") + b"-key"


def block(number: int, version: int) -> np.ndarray:
    values = np.random.default_rng([number, version]).standard_normal(
        (2, 2, 2, TOKENS, 64), np.float32
    )
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def tell(verb: str, keys: list[int]) -> None:
    line = " ".join([verb, *map(str, keys)]) + "\n"
    sys.stdout.buffer.write(line.encode())
    sys.stdout.buffer.flush()


def main(path: str, backend: str, seed: int, number: int, version: int) -> None:
    rng = random.Random(seed)
    known = [int(word) for word in sys.stdin.readline().split()]
    codec = rng.choice(["raw", "lossless"])
    store = open_store(path, GQA, capacity=None, backend=backend, codec=codec)
    ns = store.namespace(IDENTITY)
    tell("ready", [])
    last_version = version + PUTS
    pending: list[int] = []
    while True:
        chance = rng.random()
        if chance < 0.7 and version < last_version:
            keys = list(range(number, number + rng.randrange(1, 24)))
            number = keys[-1] + 1
            if rng.random() < 0.3 and known:
                keys += [key for key in rng.sample(known, min(len(known), 5)) if key not in keys]
            version += 1
            data = np.stack([block(key, version) for key in keys])
            tell("putting", [version, *keys])
            assert ns.put([key_of(key) for key in keys], data, replace=True).all_ok
            pending += keys
        elif chance < 0.9 or len(known) < 10:
            store.flush()
            tell("flushed", pending)
            known += [key for key in pending if key not in known]
            pending = []
        else:
            rng.shuffle(known)
            gone, known = known[:2], known[2:]
            tell("deleting", gone)
            ns.delete([key_of(key) for key in gone])
            tell("deleted", gone)
            pending = [key for key in pending if key not in gone]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
