"""Build the C kernels: ``python -m daso.kernels.build``; `setup.py` does it at installation.

Needs the standard library alone, and a C compiler (``$CC``, or cc). One library is built for each
instruction set that the compiler knows; which of them is used is decided when it is loaded, since
the machine that builds is often not the one that trains.
"""

import hashlib
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

__all__ = ["FOLDER", "LOG", "VARIANTS", "build", "digest", "library_name"]

FOLDER = Path(__file__).parent
SOURCES = ("native.c", "native_rows.h")
LOG = "native.log"  # what the compiler said last, for `daso doctor`
X86 = ("x86-64-v4", "x86-64-v3", "x86-64")  # the fastest first
VARIANTS = X86 if platform.machine() in ("x86_64", "AMD64") else ("generic",)
# The bits of torch: products and sums are rounded apart. No errno and no traps: neither changes a
# number, and loops with them are not vectorized.
FLAGS = (
    *("-O3", "-std=c99", "-fPIC", "-shared", "-ffp-contract=off"),
    *("-fno-math-errno", "-fno-trapping-math"),
)
LIMIT_SECONDS = 300


def library_name(variant: str) -> str:
    """Return the file name of a variant's library."""
    return f"native-{variant}.so"


def digest(folder: Path = FOLDER) -> int:
    """Return 64 bits that tell these sources from others."""
    content = b"".join((folder / name).read_bytes() for name in SOURCES)
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big")


def build(sources: Path = FOLDER, to: Path = FOLDER, extra: tuple[str, ...] = ()) -> list[str]:
    """Compile a library for each variant; return those that were built. Never raises.

    Args:
        sources: Folder of `native.c`.
        to: Folder of the libraries and of the compiler's log.
        extra: More flags for the compiler.
    """
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    built, said = [], []
    for variant in VARIANTS:
        path = to / library_name(variant)
        flags = [*FLAGS, *extra, f"-DDASO_SOURCE={digest(sources)}ull"]
        flags += [] if variant == "generic" else [f"-march={variant}"]
        made = path.with_suffix(f".{os.getpid()}")  # ranks may load while another one builds
        command = [*compiler, *flags, str(sources / SOURCES[0]), "-o", str(made)]
        try:
            to.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS
            )
            if done.returncode == 0:
                made.replace(path)
                built.append(variant)
                continue
            said.append(f"{variant}: {done.stderr.strip() or f'exit code {done.returncode}'}")
        except (OSError, subprocess.SubprocessError) as error:
            said.append(f"{variant}: {error}")
        made.unlink(missing_ok=True)
    try:
        (to / LOG).write_text("".join(f"{line}\n" for line in said), "utf-8")
    except OSError as error:
        said.append(str(error))
    for line in said:
        print(f"daso: C kernels: {line}", file=sys.stderr)
    return built


if __name__ == "__main__":
    names = build()
    print(f"built {', '.join(names)}" if names else "nothing was built; torch's operations are used")
    sys.exit(not names)
