"""C kernels are built where a compiler is, and used where they fit; elsewhere torch computes."""

import ast
import shutil
import sys
from pathlib import Path

import pytest
import torch

from daso.errors import ConfigError
from daso.kernels import build as build_module
from daso.kernels import choice, native, torch_kernels
from daso.kernels.build import (
    FOLDER,
    INSTRUCTIONS,
    LOG,
    SOURCES,
    VARIANTS,
    X86,
    build,
    digest,
    library_name,
)
from daso.kernels.native import FEATURES, KernelError, load_native, supported_variants

CPU = torch.device("cpu")
OLDEST = VARIANTS[-1]  # every processor runs it
V3 = "fma movbe abm avx2 bmi1 bmi2 f16c"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"
NAMES = {"-mlzcnt": "abm", "-mbmi": "bmi1"}  # flags that /proc/cpuinfo names otherwise


def cpuinfo(features):
    return f"processor : 0\nmodel name : one\nflags\t\t: fpu sse2 {features}\nbugs : none\n" * 2


def quick_build(to, sources=FOLDER):
    """Build one variant in half a second; without a compiler the test is skipped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_module, "VARIANTS", (OLDEST,))
        if not build(sources, to, ("-O0",)):
            pytest.skip(f"no C compiler: {(to / LOG).read_text()}")


@pytest.fixture
def choose(monkeypatch):
    """Return a function that sets DASO_KERNELS and chooses again."""

    def choose_again(name):
        monkeypatch.setenv("DASO_KERNELS", name)
        choice._choose.cache_clear()
        return choice.kernels_for(CPU)

    yield choose_again
    choice._choose.cache_clear()


@pytest.fixture
def no_library(monkeypatch):
    def refuse():
        raise KernelError("no library was built")

    monkeypatch.setattr(choice, "load_native", refuse)


# --- variants -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("features", "variants"),
    [
        ("", X86[2:]),
        (V3.replace(" fma", "").removeprefix("fma"), X86[2:]),
        (V3, X86[1:]),
        (V4, X86),
        (V4.removesuffix(" avx512vl"), X86[1:]),
        (V4.replace("movbe ", ""), X86[2:]),  # a virtual machine may hide one of them
    ],
)
def test_a_processor_runs_the_variants_whose_features_it_has(monkeypatch, features, variants):
    monkeypatch.setattr(native, "VARIANTS", X86)
    assert supported_variants(cpuinfo(features)) == list(variants)


def test_other_processors_run_the_generic_library(monkeypatch):
    monkeypatch.setattr(native, "VARIANTS", ("generic",))
    assert supported_variants("processor : 0\nFeatures : fp asimd\n") == ["generic"]
    assert supported_variants("") == ["generic"]


def test_features_that_the_compiler_may_use_are_looked_for():
    assert INSTRUCTIONS.keys() == {*X86}
    for at, variant in enumerate(X86):
        march, *flags = INSTRUCTIONS[variant]
        assert march == "-march=x86-64"
        wanted = set().union(*(FEATURES.get(name, ()) for name in X86[at:]))
        assert {NAMES.get(flag, flag.removeprefix("-m")) for flag in flags} == wanted


# --- libraries ------------------------------------------------------------------------------------


def test_a_library_of_these_sources_loads(tmp_path):
    quick_build(tmp_path)
    assert f"C kernels ({OLDEST})" in load_native(OLDEST, tmp_path).NAME
    assert (tmp_path / LOG).read_text() == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == [library_name(OLDEST), LOG]


def test_a_library_of_other_sources_is_refused_by_name(tmp_path):
    for name in SOURCES:
        shutil.copy(FOLDER / name, tmp_path)
    with (tmp_path / SOURCES[-1]).open("a") as file:
        file.write("\n")
    assert digest(tmp_path) != digest()
    quick_build(tmp_path, sources=tmp_path)
    with pytest.raises(
        KernelError, match=rf"{library_name(OLDEST)} was built from another native\.c"
    ):
        load_native(OLDEST, tmp_path)


def test_a_library_of_other_flags_is_refused(monkeypatch):
    before = digest()
    monkeypatch.setattr(build_module, "FLAGS", ("-Ofast",))
    assert digest() != before


@pytest.mark.parametrize(
    "content",
    [b"", b"no library", Path(torch._C.__file__).read_bytes()],
    ids=["empty", "text", "another library"],
)
def test_a_file_that_is_no_library_is_refused_by_name(tmp_path, content):
    (tmp_path / library_name(OLDEST)).write_bytes(content)
    with pytest.raises(KernelError, match=f"{library_name(OLDEST)} does not load .* run python -m"):
        load_native(OLDEST, tmp_path)


@pytest.mark.skipif(len(supported_variants()) < 2, reason="one instruction set is all there is")
def test_a_library_that_is_refused_leaves_the_next_one_to_load(tmp_path):
    best, *_, last = supported_variants()
    quick_build(tmp_path)
    (tmp_path / library_name(best)).write_text("of an earlier build")
    assert last in load_native(folder=tmp_path).NAME


def test_without_a_library_the_command_that_builds_it_is_told(tmp_path):
    with pytest.raises(KernelError, match=r"python -m daso\.kernels\.build, with a C compiler"):
        load_native(folder=tmp_path)


# --- compilers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compiler", "error"),
    [
        ("/nonexistent", "No such file"),
        ("false", "exit code 1"),
        ("true", "the compiler wrote nothing"),
        ("sh -c 'echo error: unknown option >&2; exit 2'", "error: unknown option"),
        ("cc '", "No closing quotation"),
    ],
)
def test_a_compiler_that_fails_is_told_and_leaves_earlier_libraries(
    tmp_path, monkeypatch, capfd, compiler, error
):
    monkeypatch.setenv("CC", compiler)
    for variant in VARIANTS:
        (tmp_path / library_name(variant)).write_text("of an earlier build")
    assert build(to=tmp_path) == []
    kept = {path.name: path.read_text() for path in tmp_path.iterdir() if path.name != LOG}
    assert kept == {library_name(variant): "of an earlier build" for variant in VARIANTS}
    lines = (tmp_path / LOG).read_text().splitlines()
    assert [line.split(":")[0] for line in lines] == list(VARIANTS)
    assert all(error in line for line in lines)
    assert capfd.readouterr().err.splitlines() == [f"daso: C kernels: {line}" for line in lines]


def test_a_folder_that_cannot_be_written_is_told(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("CC", "false")
    (tmp_path / "file").write_text("")
    assert build(to=tmp_path / "file" / "kernels") == []
    assert "Not a directory" in capfd.readouterr().err


def test_the_build_needs_the_standard_library_alone():
    """Where a wheel is built, torch is not there."""
    tree = ast.parse(Path(build_module.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {getattr(node, "module", None) or node.names[0].name for node in imports}
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names


# --- choice ---------------------------------------------------------------------------------------


def test_torch_is_chosen_by_name(choose):
    assert choose("torch") is torch_kernels
    assert choice.describe_kernels(CPU) == f"{torch_kernels.NAME} (DASO_KERNELS=torch)"


def test_c_kernels_are_chosen_where_they_load(choose, monkeypatch, tmp_path):
    quick_build(tmp_path)
    monkeypatch.setattr(choice, "load_native", lambda: load_native(OLDEST, tmp_path))
    for name in ("", "native"):
        assert choose(name) is load_native(OLDEST, tmp_path)
        assert choice.describe_kernels(CPU) == f"C kernels ({OLDEST})"


def test_without_a_library_torch_computes_and_why_is_told(choose, no_library):
    assert choose("") is torch_kernels
    assert choice.describe_kernels(CPU) == f"{torch_kernels.NAME} (no library was built)"


def test_c_kernels_that_are_asked_for_and_do_not_load_are_an_error(choose, no_library):
    with pytest.raises(ConfigError, match="'native' does not: no library was built"):
        choose("native")


def test_a_name_that_is_not_known_is_an_error(choose):
    with pytest.raises(ConfigError, match="DASO_KERNELS must be one of torch, native, triton"):
        choose("nonsense")
