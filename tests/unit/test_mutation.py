"""The mutation tester: what it changes in a C source, and what it leaves alone."""

from __future__ import annotations

import pytest
from mutation import equivalents, mutate
from mutation.mutants import Mutant, mutants_of

SOURCE = """\
/* a + b */
#define N 3
static int more[2], table[4 + 1] = {7, 0};
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


def test_sabotage_stops_every_function() -> None:
    assert mutate.sabotaged(SOURCE).count("__builtin_trap") == 1
    for path in sorted((mutate.ROOT / mutate.ENGINE).glob("codec_*.c")):
        source = path.read_text(encoding="utf-8")
        if not path.name.startswith("codec_bounded_avx"):  # all of it is a macro's
            assert mutate.sabotaged(source).count("__builtin_trap") > 1


def test_every_file_of_a_codec_has_tests() -> None:
    for path in sorted((mutate.ROOT / mutate.ENGINE).glob("codec_*.[ch]")):
        for test in mutate.tests_of(path.name):
            assert (mutate.ROOT / test).is_file()
    assert mutate.tests_of("codec_prefix_planes.h") != mutate.tests_of("codec_prefix.h")


def test_listed_equivalents_are_mutants_of_today() -> None:
    """An entry goes when its line of code goes."""
    today = set()
    for path in (mutate.ROOT / mutate.ENGINE).glob("codec_*.[ch]"):
        source = path.read_text(encoding="utf-8")
        for mutant in mutants_of(path.name, source):
            place, change = (
                equivalents.place_of(mutant, source),
                equivalents.change_of(mutant, source),
            )
            today.add((place, change))
    assert set(equivalents.listed()) <= today


def test_how_equivalents_are_listed() -> None:
    mutant = next(m for m in mutants_of("f.c", SOURCE) if m.old == "&&")
    place, change = equivalents.place_of(mutant, SOURCE), equivalents.change_of(mutant, SOURCE)
    assert place == "f.c f: if (*a < 16u && -b != 0x0F) return a[1] << 2;"
    assert change == "13 '&&' -> '||'"
    text = f"# why\n{place}\n    {change}: neither is ever true\n"
    assert equivalents.listed(text) == {(place, change): "neither is ever true"}
    for wrong in (f"    {change}: no place\n", f"{place}\n    {change}:\n"):
        with pytest.raises(ValueError, match="no entry"):
            equivalents.listed(wrong)


@pytest.mark.slow
def test_the_core_that_was_changed_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    file = "codec_delta.c"
    fault = next(m for m in mutants_of(file, mutate.source_of(file)) if m.old == "^")
    comment = Mutant(file, 1, 0, 0, "", "/* */ ")
    known = {}
    with mutate.workshops(1, [file]) as (workshop,):
        assert mutate.judge(workshop, fault, known).name == mutate.KILLED
        assert mutate.judge(workshop, comment, known).name == mutate.SAME_CODE
        assert workshop.linked()
        assert workshop.digest() == workshop.whole
        assert workshop.tried(mutate.tests_of(file), 5).passed
        # Linked elsewhere, as by setuptools, or not at all.
        monkeypatch.setattr(workshop, "linked", lambda: True)
        with pytest.raises(SystemExit, match="the whole one"):
            mutate.judge(workshop, fault, known)
        monkeypatch.setattr(workshop, "_made", lambda _objects: "core")
        with pytest.raises(SystemExit, match="stops the process"):
            mutate.prove(workshop, [file])
        # Another installation's.
        monkeypatch.setattr(workshop, "digest", lambda: "0" * 64)
        with pytest.raises(SystemExit, match="another core"):
            workshop.tried(mutate.tests_of(file), 5)
