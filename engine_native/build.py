"""Builds flashkv._native, the compiled data plane, with cffi in API mode.

Invariants
 - format.h and flashkv_native.h are the single source of every layout and prototype: cffi reads the
   same text as the C compiler, and the compiler checks every size, offset and constant;
 - every engine_native/*.c is part of the module; a file that needs what a machine lacks compiles to
   something that says so;
 - no processor flags: code for newer instructions carries per-function target attributes and is
   chosen at run time;
 - without liburing the module still builds, and the `threads` backend serves;
 - FLASHKV_TEST_BUILD=1 in the environment adds the simulated device and memory that runs out
   (FKV_TEST_BUILD, sim.h); no wheel is built with it;
 - FLASHKV_COVERAGE=1 counts branches (gcov), in a build of its own below build/coverage; the one in
   flashkv/ stays as it is.

`pip install .` comes here through setup.py (cffi_modules); `python engine_native/build.py` builds
in place, into flashkv/, and is a test build unless FLASHKV_TEST_BUILD=0.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "engine_native"
HEADERS = ("format.h", "flashkv_native.h")
TEST_HEADERS = ("sim.h",)

LIBURING_CHECK = """
#include <liburing.h>
int main(void) {
    struct io_uring ring;
    struct io_uring_params params = {0};
    params.flags = IORING_SETUP_COOP_TASKRUN | IORING_SETUP_SINGLE_ISSUER
                 | IORING_SETUP_DEFER_TASKRUN;
    if (io_uring_queue_init_params(8, &ring, &params) == 0) {
        io_uring_register_buffers_sparse(&ring, 8);
        io_uring_queue_exit(&ring);
    }
    return 0;
}
"""

# The generated wrappers are not ours to tidy.
PRELUDE = """
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#pragma GCC diagnostic ignored "-Wcast-function-type"
#include "flashkv_native.h"
"""


def is_test_build() -> bool:
    """Whether the environment asks for one."""
    return os.environ.get("FLASHKV_TEST_BUILD", "0") == "1"


def is_coverage_build() -> bool:
    """Whether the environment asks for one."""
    return os.environ.get("FLASHKV_COVERAGE", "0") == "1"


def declarations() -> str:
    """The headers as cffi takes them: no preprocessor lines, constants left to the compiler."""
    lines = []
    for header in HEADERS + (TEST_HEADERS if is_test_build() else ()):
        for line in (ROOT / FOLDER / header).read_text(encoding="utf-8").splitlines():
            constant = re.match(r"#define\s+(FKV_\w+)\s+\(?-?[0-9]", line)
            if constant:
                lines.append(f"#define {constant[1]} ...")
                # A comment that goes on in the next line must not lose its opening.
                if "/*" in line and "*/" not in line:
                    lines.append(line[line.index("/*") :])
            elif not line.startswith("#"):
                lines.append(line)
    return "\n".join(lines)


def have_liburing() -> bool:
    """Whether a program that uses what io_uring.c needs compiles and links.

    FLASHKV_NO_LIBURING=1 in the environment says no.
    """
    if os.environ.get("FLASHKV_NO_LIBURING") == "1":
        return False
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    flags = shlex.split(os.environ.get("CFLAGS", ""))
    link_flags = shlex.split(os.environ.get("LDFLAGS", ""))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "check.c")
        source.write_text(LIBURING_CHECK, encoding="utf-8")
        output = str(Path(folder, "check"))
        command = [*compiler, *flags, str(source), "-o", output, *link_flags, "-luring"]
        try:
            done = subprocess.run(command, capture_output=True, timeout=60, check=False)
            return done.returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False


def make_builder() -> FFI:
    liburing = have_liburing()
    if not liburing:
        print("flashkv: no liburing; building with the threads backend only", file=sys.stderr)
    macros = [("FKV_HAVE_LIBURING", "1")] if liburing else []
    if is_test_build():
        macros.append(("FKV_TEST_BUILD", "1"))
    counting = []
    if is_coverage_build():
        macros.append(("FKV_COVERAGE", "1"))
        counting = ["-O0", "--coverage", "-fprofile-update=atomic"]  # of all threads, each exact
    folder = ROOT / FOLDER
    builder = FFI()
    builder.cdef(declarations())
    builder.set_source(
        "flashkv._native",
        PRELUDE + ('#include "sim.h"\n' if is_test_build() else ""),
        # Relative to the project's root, where setuptools runs.
        sources=sorted(f"{FOLDER}/{path.name}" for path in folder.glob("*.c")),
        depends=sorted(f"{FOLDER}/{path.name}" for path in folder.glob("*.h")),
        include_dirs=[FOLDER],
        define_macros=macros,
        libraries=["m", "uring"] if liburing else ["m"],
        extra_compile_args=[
            "-std=gnu11",
            "-D_GNU_SOURCE",
            "-O3",
            "-g",
            "-Wall",
            "-Wextra",
            "-Werror=implicit-function-declaration",
            "-UNDEBUG",  # asserts state invariants and stay
            "-fvisibility=hidden",
            "-pthread",
            # The bounded codes: every path rounds each operation once. Nobody asks for exceptions.
            "-ffp-contract=off",
            "-fno-math-errno",
            "-fno-trapping-math",
            *counting,
        ],
        extra_link_args=["-pthread", *counting],
    )
    return builder


def build_in_place() -> int:
    """A developer's build of flashkv/_native*.so, as an installation does it. One at a time."""
    os.environ.setdefault("FLASHKV_TEST_BUILD", "1")
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / "native.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, "setup.py", "--quiet", "build_ext"]
        if is_coverage_build():
            command += ["--build-lib=build/coverage/lib", "--build-temp=build/coverage/objects"]
        else:
            command += ["--inplace"]
        return subprocess.run([*command, *sys.argv[1:]], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(build_in_place())
else:
    ffibuilder = make_builder()
