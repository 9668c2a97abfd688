"""Build the C kernels: ``python -m daso.kernels.build``; `setup.py` does it at installation.

Needs only the standard library and a C compiler (``$CC``, or cc). One library is built for each
instruction set that the compiler knows. The one to use is selected when it is loaded, because the
machine that builds is often not the one that trains.
"""

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = ("native.c", "native_rows.h")
LOG = "native.log"  # the compiler's last output, for `daso doctor`
X86 = ("x86-64-v4", "x86-64-v3", "x86-64")  # the fastest first
VARIANTS = X86 if platform.machine() in ("x86_64", "AMD64") else (platform.machine() or "generic",)
AVX2 = ("-mavx2", "-mbmi", "-mbmi2", "-mf16c", "-mfma", "-mlzcnt", "-mmovbe")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl")
# By features, because GCC before 11 and Clang before 12 do not know the variants by name. -march is
# always passed, because compiler wrappers set the processor of the machine that builds.
INSTRUCTIONS = {
    "x86-64-v4": ("-march=x86-64", *AVX2, *AVX512),
    "x86-64-v3": ("-march=x86-64", *AVX2),
    "x86-64": ("-march=x86-64",),
}
# For the bits of torch, products and sums are rounded separately. No errno and no traps: neither
# changes a number, and loops with them are not vectorized.
FLAGS = (
    *("-O3", "-std=c99", "-fPIC", "-shared", "-ffp-contract=off"),
    *("-fno-fast-math", "-fno-math-errno", "-fno-trapping-math"),
)
LIMIT_SECONDS = 300


def library_name(variant: str) -> str:
    """Return the file name of a variant's library."""
    return f"native-{variant}.so"


def digest(folder: Path = FOLDER) -> int:
    """Return 64 bits that identify the sources and the flags of the compiler."""
    content = b"".join((folder / name).read_bytes() for name in SOURCES)
    content += repr((FLAGS, INSTRUCTIONS)).encode()
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big")


def build(sources: Path = FOLDER, to: Path = FOLDER, extra: tuple[str, ...] = ()) -> list[str]:
    """Compile a library for each variant; return those that were built. Never raises.

    Args:
        sources: Folder of `native.c`.
        to: Folder of the libraries and of the compiler's log.
        extra: More flags for the compiler.
    """
    built, errors = [], []
    for variant in VARIANTS:
        if error := _compile(variant, sources, to, extra):
            errors.append(f"{variant}: {error}")
        else:
            built.append(variant)
    try:
        (to / LOG).write_text("".join(f"{line}\n" for line in errors), "utf-8")
    except OSError as error:
        errors.append(str(error))
    for line in errors:
        print(f"daso: C kernels: {line}", file=sys.stderr)
    return built


def _compile(variant: str, sources: Path, to: Path, extra: tuple[str, ...]) -> str | None:
    """Replace a variant's library; return the compiler's error, if any.

    The library is replaced atomically, because another process may be loading it. If an old library
    remains after an error, loading it raises if its sources differ.
    """
    path, part = to / library_name(variant), None
    try:
        compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
        flags = [
            *FLAGS,
            *INSTRUCTIONS.get(variant, ()),
            *extra,
            f"-DDASO_SOURCE={digest(sources)}ull",
        ]
        to.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=to)
        os.close(handle)
        part = Path(name)
        command = [*compiler, *flags, str(sources / SOURCES[0]), "-o", name]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=LIMIT_SECONDS,
        )
        if done.returncode == 0 and not part.stat().st_size:
            error = "the compiler wrote nothing"
        elif done.returncode == 0:
            part.chmod(0o755)
            part.replace(path)
            return None
        else:
            error = done.stderr.strip() or f"exit code {done.returncode}"
    except (OSError, ValueError, subprocess.SubprocessError) as failure:
        error = str(failure)
    with suppress(OSError):
        if part is not None:
            part.unlink(missing_ok=True)
    return error


if __name__ == "__main__":
    names = build()
    print(
        f"built {', '.join(names)}" if names else "nothing was built; torch's operations are used"
    )
    sys.exit(not names)
