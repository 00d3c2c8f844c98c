"""The mutation tester: what it changes in a C source, and what it leaves alone."""

from __future__ import annotations

import pytest
from mutation import mutate
from mutation.mutants import mutants_of

SOURCE = """\
/* a + b */
#define N 3
static int table[4] = {7, 0};
const char *name = "1 < 2"; // 5
int f(int *a, unsigned b)
{
    if (*a < 16u && -b != 0x0F) return a[1] << 2;
    for (int i = 0; i < 4; i++) *a += ~b;
    return true;
}
"""


def changes() -> list[tuple[int, str, str]]:
    return [(m.line, m.old, m.text) for m in mutants_of("f.c", SOURCE)]


def test_what_is_changed() -> None:
    found = changes()
    for change in (
        (3, "7", "8"),
        (3, "7", "6"),
        (3, "0", "1"),
        (7, "<", "<="),
        (7, "<", ">"),
        (7, "16u", "17u"),
        (7, "16u", "15u"),
        (7, "&&", "||"),
        (7, "!=", "=="),
        (7, "0x0F", "16"),
        (7, "1", "0"),
        (7, "<<", ">>"),
        (8, "+=", "-="),
        (8, "~", ""),
        (9, "true", "false"),
    ):
        assert change in found, change
    assert len(found) == len(set(found)) == 24


def test_what_is_left_alone() -> None:
    """Comments, strings, the preprocessor, sizes of arrays, pointers, signs."""
    lines = {line for line, _, _ in changes()}
    assert lines == {3, 7, 8, 9}
    assert (3, "4", "5") not in changes()
    assert not any(old in ("*", "-") for _, old, _ in changes())


def test_a_mutant_is_one_change() -> None:
    for mutant in mutants_of("f.c", SOURCE):
        changed = mutant.apply(SOURCE)
        assert changed != SOURCE
        before, after = SOURCE.splitlines(), changed.splitlines()
        differing = [
            i + 1 for i, pair in enumerate(zip(before, after, strict=True)) if len(set(pair)) == 2
        ]
        assert differing == [mutant.line]
    assert str(mutants_of("f.c", SOURCE)[0]) == "f.c:3: '7' -> '8'"


def test_samples_are_repeated_by_their_seed() -> None:
    files = ["codec_fxp.c", "codec_prefix.c"]
    first, again, other = (mutate.sample(files, 40, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) == 40
    assert {mutant.file for mutant in first} == set(files)
    assert all(mutate.tests_of(mutant.file) for mutant in first)
    with pytest.raises(SystemExit, match="no tests are known"):
        mutate.tests_of("crc32c.c")
