import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from expected_errors import raises
from jobs import HANG_SECONDS

from daso.errors import ConfigError
from daso.slurm.job import Job, render
from daso.slurm.launcher import choose
from daso.slurm.sites import FOLDER, known_sites, parse_site, read_site, read_template

ROOT = Path(__file__).parents[3]
OFFERED = ("none", "pmix", "pmi2", "cray_shasta")
REAL = ["horeka", "jsc", "lumi", "nersc", "olcf"]


@pytest.fixture(autouse=True)
def no_site(monkeypatch):
    for name in ("DASO_SITE", "DASO_MINICLUSTER"):
        monkeypatch.delenv(name, raising=False)


def script(name, library="Cray MPICH", **flags):
    site = read_site(name)
    values = {"account": "project_1", **site.defaults, **flags}
    launcher = choose(library, OFFERED, site.launcher)
    job = Job(program=("train.py",), launcher=launcher, chdir=Path("/w"), site=name, **values)
    text, template = read_template(None)
    return render(job, text, name=template)


def directives(text):
    return {line[8:] for line in text.splitlines() if line.startswith("#SBATCH ")}


# --- files ----------------------------------------------------------------------------------------


def test_the_package_finds_the_files_of_the_repository():
    assert known_sites() == sorted([*REAL, "minicluster"])
    assert (FOLDER / "job.sbatch.j2").is_file()


def test_every_file_is_one_that_a_wheel_takes_along():
    import configparser

    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    patterns = setup["options.package_data"]["daso.slurm"].split()
    package = ROOT / "daso" / "slurm"
    taken = {path.resolve() for pattern in patterns for path in package.glob(pattern)}
    there = {path for path in FOLDER.rglob("*") if path.is_file()}
    assert taken == there


def test_a_wheel_has_the_files(tmp_path):
    source = tmp_path / "source"
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if tracked.returncode != 0:
        pytest.skip("not a git checkout")
    for name in filter(None, tracked.stdout.split("\0")):
        if name.startswith(("daso/", "setup.cfg", "pyproject", "README", "LICENSE")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    code = "from setuptools import build_meta; build_meta.build_wheel('out')"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    if re.search("No module named 'setuptools'|invalid command 'bdist_wheel'", run.stderr):
        pytest.skip("setuptools is not installed, or too old to make a wheel by itself")
    assert run.returncode == 0, run.stderr
    (wheel,) = (source / "out").glob("*.whl")
    shutil.unpack_archive(wheel, tmp_path / "installed", "zip")
    words = [sys.executable, "-c", "from daso.slurm.sites import known_sites as s; print(*s())"]
    run = subprocess.run(
        words,
        cwd=tmp_path / "installed",
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert run.stdout.split() == known_sites(), run.stderr


# --- every profile --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", known_sites())
def test_every_profile_makes_a_script(name):
    text = script(name)
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    assert {"--account=project_1", "--requeue"} <= directives(text)
    assert any(line.startswith("--time=") for line in directives(text))
    assert f"for the site {name}" in text


@pytest.mark.parametrize("name", REAL)
def test_every_profile_says_its_sources_with_a_date_and_what_to_edit(name):
    head = (FOLDER / "sites" / f"{name}.toml").read_text().split("\n\n")[0].replace("\n# ", " ")
    assert re.search(r"Read on \d{4}-\d\d-\d\d", head)
    assert re.search(r"https://|github\.com/", head)
    assert "To edit: account" in head


@pytest.mark.parametrize("name", known_sites())
def test_no_profile_names_an_account(name):
    assert "account" not in read_site(name).defaults


@pytest.mark.parametrize(
    ("name", "lines", "ranks"),
    [
        (
            "jsc",
            {"--partition=booster", "--gres=gpu:4", "--ntasks-per-node=4", "--cpus-per-task=24"},
            "srun --kill-on-bad-exit=1 --cpu-bind=none python3",
        ),
        (
            "nersc",
            {"--constraint=gpu", "--qos=regular", "--gpus-per-node=4", "--gpu-bind=none"},
            "srun --mpi=cray_shasta --kill-on-bad-exit=1 --cpu-bind=cores python3",
        ),
        (
            "olcf",
            {"--partition=batch", "--gpus-per-node=8", "--gpu-bind=closest", "--cpus-per-task=7"},
            "srun --mpi=cray_shasta --kill-on-bad-exit=1 python3",
        ),
        (
            "lumi",
            {"--partition=standard-g", "--gpus-per-node=8", "--ntasks-per-node=8"},
            "srun --mpi=cray_shasta --kill-on-bad-exit=1 --cpu-bind=mask_cpu:fe000000000000,fe",
        ),
        (
            "horeka",
            {"--partition=accelerated", "--gres=gpu:4", "--cpus-per-task=38"},
            "srun --mpi=cray_shasta --kill-on-bad-exit=1 python3",
        ),
        ("minicluster", {"--ntasks-per-node=1"}, "srun --mpi=cray_shasta --kill-on-bad-exit=1"),
    ],
)
def test_the_text_of_every_profile(name, lines, ranks):
    text = script(name)
    assert lines <= directives(text)
    assert f"\n{ranks}" in text


def test_the_ranks_of_lumi_have_as_many_masks_as_gpus():
    (option,) = read_site("lumi").defaults["srun"]
    masks = [int(mask, 16) for mask in option.removeprefix("--cpu-bind=mask_cpu:").split(",")]
    assert [mask.bit_count() for mask in masks] == [7] * 8
    assert sum(masks).bit_count() == 56  # no core twice


def test_jsc_and_lumi_say_what_else_they_need():
    assert "export CUDA_VISIBLE_DEVICES=0,1,2,3" in script("jsc")
    assert script("lumi").startswith("#!/bin/bash -l\n")
    assert "singularity exec --rocm x.sif" in script("lumi", container="x.sif")


def test_the_environment_tells_where_the_minicluster_is(monkeypatch):
    assert read_site("minicluster").client == {"SLURM_CONF": "/run/daso-minicluster/slurm.conf"}
    monkeypatch.setenv("DASO_MINICLUSTER", "/run/other")
    assert read_site("minicluster").client == {"SLURM_CONF": "/run/other/slurm.conf"}


# --- reading --------------------------------------------------------------------------------------


def test_a_site_is_given_by_flag_before_environment_and_may_be_none(monkeypatch):
    assert read_site(None).name == ""
    monkeypatch.setenv("DASO_SITE", "lumi")
    assert read_site(None).name == "lumi"
    assert read_site("jsc").name == "jsc"


def test_a_file_of_ones_own_is_a_site(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('partition = "p"\nnodes = 2\nmodule = ["a"]\n[environment]\nA = "b=c"\n')
    site = read_site(str(path))
    assert site.name == "mine"
    assert site.defaults == {
        "partition": "p",
        "nodes": 2,
        "module": ("a",),
        "environment": ("A=b=c",),
    }


def test_an_unknown_site_is_told_with_those_there_are():
    with pytest.raises(ConfigError) as caught:
        read_site("frontier")
    assert "horeka, jsc, lumi, minicluster, nersc, olcf, or a TOML file" in str(caught.value)
    assert "'frontier'" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("partion = 'x'", ["'partion'", "did you mean 'partition'?", "valid keys", "launcher"]),
        ("nodes = '2'", ["nodes", "whole number", "'2'"]),
        ("nodes = true", ["nodes", "whole number", "True"]),
        ("partition = 2", ["partition", "text", "2"]),
        ("exclusive = 1", ["exclusive", "true or false"]),
        ("module = 'GCC'", ["module", "list of texts", "'GCC'"]),
        ("module = [1]", ["module", "list of texts"]),
        ("client = 'x'", ["client", "table of texts"]),
        ("[environment]\nA = 1", ["environment", "table of texts"]),
        ("nodes = ", ["must be TOML"]),
        ("program = ['x']", ["'program'", "valid keys"]),
    ],
)
def test_wrong_profiles_are_told_in_one_line(text, parts):
    with pytest.raises(ConfigError, match=r"mine\.toml") as caught:
        parse_site("mine", text, "mine.toml")
    assert "\n" not in str(caught.value)
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize("read", [lambda p: read_site(str(p)), read_template])
def test_a_file_that_cannot_be_read_is_told(tmp_path, read):
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "nosuch.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with raises("profile-not-text"):
        read(binary)


# --- the scripts for people who want no tool ------------------------------------------------------


def test_the_batch_script_of_the_bench_finds_its_modules():
    """All that `python -m benchmarks` imports, also where daso is installed and nothing else is."""
    text = (ROOT / "slurm" / "bench.sbatch").read_text()
    (command,) = re.findall(r"^PYTHONPATH=.* python -m benchmarks accuracy", text, re.MULTILINE)
    environment = {"PATH": os.environ["PATH"], "HOME": "/"}
    run = subprocess.run(
        ["bash", "-c", command.replace(" python ", f" {sys.executable} ") + " --help"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("usage: scripts/bench accuracy")


PLAIN = sorted((ROOT / "slurm").glob("*.sbatch"))


def test_these_scripts_are_there():
    assert [path.name for path in PLAIN] == ["bench.sbatch", "check.sbatch", "train.sbatch"]


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.stem)
def test_bash_and_shellcheck_like_them(path):
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    if shutil.which("shellcheck"):
        words = ["shellcheck", "-s", "bash", str(path)]
        run = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (run.returncode, run.stdout) == (0, "")


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.stem)
def test_their_directives_stand_above_the_first_command(path):
    lines = path.read_text().splitlines()
    first = next(at for at, line in enumerate(lines) if line and not line.startswith("#"))
    last = max(at for at, line in enumerate(lines) if line.startswith("#SBATCH "))
    assert last < first


def rendered():
    launcher = choose("MPICH", OFFERED)
    job = Job(program=("x.py",), launcher=launcher, chdir=Path("/w"), python="python")
    text, name = read_template(None)
    return render(replace(job, logs="."), text, name=name).splitlines()


def test_train_does_what_the_template_does():
    ours = [line.replace("$PWD/", "/w/") for line in PLAIN[2].read_text().splitlines()]
    missing = [line for line in rendered() if line not in ours]
    text = [line for line in missing if not line.startswith(("#SBATCH", "# Written", "# 1 node"))]
    assert [line.split(" x.py")[0] for line in text] == [
        'export DASO_REQUEUE=/w"/requeue-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"',
        "srun --mpi=pmi2 --kill-on-bad-exit=1 python -m mpi4py -m daso.slurm.rank_entry",
    ]
    assert 'export DASO_REQUEUE="/w/requeue-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"' in ours
    assert (
        '"${launcher[@]}" python -m mpi4py -m daso.slurm.rank_entry "${program[@]}" || code=$?'
        in ours
    )
    assert "launcher=(srun --mpi=pmi2 --kill-on-bad-exit=1)" in ours


def test_check_sets_what_the_template_sets():
    ours = PLAIN[1].read_text().splitlines()
    exports = [line for line in rendered() if line.startswith("export ")]
    assert [line for line in exports if line not in ours] == exports[-2:]  # of restarts
    assert "launcher=(srun --mpi=pmi2 --kill-on-bad-exit=1)" in ours


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.stem)
def test_modules_that_scripts_without_a_tool_run_exist(path):
    named = re.findall(r"python -m ([\w.]+)", path.read_text(encoding="utf-8"))
    assert [name for name in named if find_spec(name) is None] == []
