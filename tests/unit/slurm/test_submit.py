import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import HANG_SECONDS

from daso.cli.main import main
from daso.slurm.job import Job, options
from daso.slurm.launcher import Launcher
from daso.slurm.slurm_commands import explain, too_big
from daso.slurm.submit import split_words

LAUNCHERS = ("PMI", "OMPI_", "PRTE_", "SLURM_", "DASO_", "SBATCH_")


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """A folder with a script in it, and a machine without SLURM."""
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    Path("train.py").write_text("print(1)\n")


def job(**values):
    launcher = Launcher("pmi2", "MPICH", "")
    return Job(program=("x.py",), launcher=launcher, chdir=Path("/w"), **values)


def dry(capfdbinary, *words):
    assert main(["submit", "--dry-run", *words]) == 0
    out, err = capfdbinary.readouterr()
    return out.decode(), err.decode()


def refused(capsys, *words):
    assert main(["submit", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("daso: ")
    assert err.count("\n") == 1
    assert not Path("runs").exists()
    return err


def directives(text):
    return {line[8:] for line in text.splitlines() if line.startswith("#SBATCH ")}


# --- words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "ours", "program"),
    [
        ("train.py", [], ["train.py"]),
        ("--nodes 4 train.py --nodes 5", ["--nodes=4"], ["train.py", "--nodes", "5"]),
        ("--nodes=4 -m pack.mod -h", ["--nodes=4"], ["-m", "pack.mod", "-h"]),
        ("--dry-run train.py", ["--dry-run"], ["train.py"]),
        ("--exclusive --no-login-shell t.py", ["--exclusive", "--no-login-shell"], ["t.py"]),
        ("--extra --hold --nodes 2 t.py", ["--extra=--hold", "--nodes=2"], ["t.py"]),
        ("--srun --cpu-bind=cores t.py", ["--srun=--cpu-bind=cores"], ["t.py"]),
        ("--setup -m -m pack", ["--setup=-m"], ["-m", "pack"]),
        ("--nodes 2 -- -m pack", ["--nodes=2"], ["-m", "pack"]),
        ("-- train.py --", [], ["train.py", "--"]),
        ("-h", ["-h"], []),
        ("--nodes", ["--nodes"], []),
        ("", [], []),
    ],
)
def test_options_end_where_the_program_begins(words, ours, program):
    assert split_words(words.split()) == (ours, tuple(program))


def test_help_names_every_option_and_its_default(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["submit", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    listed = set(re.findall(r"(?<=[ ,] )--[\w-]+", re.sub(r"^ {12,}.*", "", text, flags=re.M)))
    ours = {f"--{name.replace('_', '-')}" for name in options()}
    known = {"--help", "--dry-run", "--site", "--template", "--launcher", "--ntasks", "--gpus"}
    assert listed >= ours | known
    joined = " ".join(text.split())
    assert "before the time limit; default: 120" in joined
    assert "horeka, jsc, lumi, minicluster, nersc" in joined
    assert "0-9%2" in text


# --- scripts --------------------------------------------------------------------------------------


def test_dry_run_prints_only_the_script(capfdbinary):
    out, err = dry(capfdbinary, "--nodes", "2", "--time=0:30:00", "train.py", "a b")
    assert out.startswith("#!/bin/bash\n#SBATCH --job-name=train\n#SBATCH --nodes=2\n")
    assert f"{sys.executable} -m mpi4py -m daso.slurm.rank_entry train.py 'a b'" in out
    assert re.match(r"daso: 2 nodes x 1 rank, (srun|mpirun).*: the MPI library is ", err)
    assert err.endswith(f"; before: mkdir -p {Path.cwd() / 'runs/slurm'}\n")
    assert err.count("\n") == 1
    assert not Path("runs").exists()


def test_words_of_sbatch_are_known(capfdbinary):
    words = "-N 2 -n8 --gpus=4 -c 3 -p small -A me -t 10 -J name -q high -C fast -a 0-3"
    out, _ = dry(capfdbinary, *words.split(), "-d", "afterok:1", "train.py", "-n", "5")
    for line in (
        *("nodes=2", "ntasks-per-node=4", "gpus-per-node=2", "cpus-per-task=3", "partition=small"),
        *("account=me", "time=10", "job-name=name", "qos=high", "constraint=fast", "array=0-3"),
        "dependency=afterok:1",
    ):
        assert f"#SBATCH --{line}\n" in out
    assert "daso.slurm.rank_entry train.py -n 5" in out
    assert "--ntasks-per-node=3\n" in dry(capfdbinary, "--ntasks-per-node", "3", "train.py")[0]


def test_masks_of_cpus_are_kept_where_mpirun_starts_the_ranks(capfdbinary):
    out, err = dry(capfdbinary, "--site=lumi", "--launcher=mpirun", "-A", "me", "train.py")
    assert "export DASO_CPU_MASKS=fe000000000000,fe00000000000000,fe0000," in out
    assert "left out" not in err
    out, err = dry(capfdbinary, "--launcher=mpirun", "--srun=--cpu-bind=cores", "train.py")
    assert "DASO_CPU_MASKS" not in out
    assert "options of srun are left out: --cpu-bind=cores; --launcher=srun keeps them" in err


def test_the_job_runs_where_it_is_submitted(capfdbinary, tmp_path):
    out, _ = dry(capfdbinary, "train.py")
    assert {f"--chdir={tmp_path}", f"--output={tmp_path}/runs/slurm/%x-%j.out"} <= directives(out)


def test_flags_come_before_the_site_and_lists_are_joined(capfdbinary):
    Path("mine.toml").write_text(
        'nodes = 3\npartition = "big"\nexclusive = true\nmodule = ["a"]\nlauncher = "pmi2"\n'
        '[environment]\nA = "1"\n'
    )
    words = ["--site=mine.toml", "--nodes=2", "--module=b", "--environment", "A=2"]
    out, _ = dry(capfdbinary, *words, "train.py")
    assert {"--nodes=2", "--partition=big", "--exclusive"} <= directives(out)
    assert "module load a\nmodule load b\n" in out
    assert "export A=1\nexport A=2\n" in out
    assert "srun --mpi=pmi2" in out
    out, _ = dry(capfdbinary, *words, "--no-exclusive", "--launcher=srun", "train.py")
    assert "--exclusive" not in directives(out)
    assert "\nsrun --kill-on-bad-exit=1 " in out


def test_a_program_may_be_a_module_with_any_arguments(capfdbinary):
    out, _ = dry(capfdbinary, "-m", "daso", "train", "--epochs=20", "--name=a b")
    assert "-m daso.slurm.rank_entry -m daso train --epochs=20 '--name=a b'" in out
    assert "--job-name=daso" in directives(out)


@pytest.mark.parametrize("word", ["--python=/cluster/python", "--container=x.sif"])
def test_a_library_that_cannot_be_seen_is_not_guessed(capsys, word):
    assert "give --launcher" in refused(capsys, word, "--dry-run", "train.py")


def test_another_python_and_a_container_bring_their_own_mpi(capfdbinary):
    words = ["--python=/cluster/python", "--launcher=pmix"]
    out, _ = dry(capfdbinary, *words, "train.py")
    assert "\nsrun --mpi=pmix --kill-on-bad-exit=1 /cluster/python -m mpi4py" in out
    words = ["--container=x.sif", "--launcher=mpirun", "--gpus-per-node=2"]
    out, _ = dry(capfdbinary, *words, "in-the-image.py")
    assert "\nmpirun -n 1 apptainer exec --nv x.sif python3 -m mpi4py" in out


def test_a_template_of_ones_own_is_used(capfdbinary):
    Path("own.j2").write_text("nodes: {{ nodes }}, {{ command }}\n")
    out, _ = dry(capfdbinary, "--template", "own.j2", "--launcher=srun", "train.py")
    assert out.startswith("nodes: 1, srun --kill-on-bad-exit=1 ")


def test_words_that_are_no_utf_8_pass_through(tmp_path):
    words = [sys.executable, "-m", "daso", "submit", "--dry-run", "train.py", b"caf\xe9"]
    run = subprocess.run(words, capture_output=True, timeout=HANG_SECONDS, check=False)
    assert run.returncode == 0, run.stderr
    assert b"train.py 'caf\xe9'" in run.stdout


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["a program must follow", "daso submit"]),
        (["--nodes", "2"], ["a program must follow"]),
        (["-m"], ["-m must be followed by a module"]),
        (["nosuch.py"], ["no nosuch.py", "mend its path"]),
        (["--time", "half", "train.py"], ["--time", "'half'", "0:30:00 for half an hour"]),
        (["--nodes", "0", "train.py"], ["--nodes", "at least 1", "not 0"]),
        (["-N2", "-n", "5", "train.py"], ["--ntasks must be a multiple", "5 ranks"]),
        (
            ["--gpus=1", "-N", "2", "train.py"],
            ["--gpus must be a multiple", "1 GPUs", "on 2 nodes"],
        ),
        (["-n4", "--tasks-per-node=3", "train.py"], ["--ntasks and --tasks-per-node", "not 3"]),
        (["--site", "mars", "train.py"], ["horeka, jsc", "'mars'"]),
        (["--site", "mars.toml", "train.py"], ["mars.toml", "No such file"]),
        (["--template", "no.j2", "train.py"], ["no.j2", "No such file"]),
        (["--launcher", "pbs", "train.py"], ["auto, pmix", "'pbs'"]),
        (["train.py"], ["sbatch", "on PATH", "--dry-run", "daso run"]),
    ],
)
def test_what_cannot_be_submitted_is_told_in_one_line(capsys, words, parts):
    words = [*words] if "--launcher" in words else ["--launcher=pmi2", *words]
    err = refused(capsys, *words)
    assert all(part in err for part in parts)


def test_a_missing_key_of_a_template_is_told(capsys):
    Path("own.j2").write_text("{{ partitoin }}")
    err = refused(capsys, "--template=own.j2", "train.py")
    assert "own.j2 uses partitoin" in err
    assert "partition, " in err


@pytest.mark.parametrize("words", [["--nodes", "two"], ["--nods=2"], ["--nodes"], ["-x"]])
def test_words_that_are_no_options_are_named(capsys, words):
    with pytest.raises(SystemExit) as caught:
        main(["submit", *words, "train.py"] if words != ["--nodes"] else ["submit", *words])
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert words[0].split("=")[0] in err
    assert "`daso submit --help` shows how" in err


SINFO = "mini*|4|3\nmini*|16|1\nbig|64|8\nlumped|32+|20\n"


@pytest.mark.parametrize(
    "values",
    [
        {"nodes": 4, "tasks_per_node": 4},
        {"nodes": 1, "tasks_per_node": 4, "cpus_per_task": 4},
        {"nodes": 8, "tasks_per_node": 64, "partition": "big"},
        {"nodes": 8, "tasks_per_node": 64, "partition": "mini,big"},
        {"nodes": 99, "partition": "of-another-cluster"},
        {"tasks_per_node": 64, "partition": "lumped"},
        {"tasks_per_node": 99, "extra": ("--overcommit",)},
    ],
)
def test_what_fits_into_a_partition_passes(values):
    assert too_big(job(**values), SINFO) is None


@pytest.mark.parametrize(
    "values",
    [
        {"nodes": 5},
        {"nodes": 2, "tasks_per_node": 5},
        {"tasks_per_node": 5, "cpus_per_task": 4},
        {"nodes": 9, "partition": "big"},
        {"tasks_per_node": 65, "partition": "big"},
    ],
)
def test_more_ranks_than_slots_are_told_with_what_there_is(values):
    wrong = job(**values)
    text = str(too_big(wrong, SINFO))
    assert wrong.size in text
    there = "8 of 64 CPUs" if wrong.partition else "3 of 4 CPUs, 1 of 16 CPUs"
    assert there in text
    assert "take fewer --nodes" in text
    assert "\n" not in text


@pytest.mark.parametrize("text", ["", "slurm_load_partitions: Unable to contact\n", "a|b\n"])
def test_without_an_answer_sbatch_decides(text):
    assert too_big(job(nodes=99), text) is None


def test_a_partition_of_many_nodes_is_no_riddle(capsys, tmp_path):
    """Unless told otherwise, sinfo writes 1536 as 1.50K."""
    exact = 'case "$*" in *--noconvert*) echo "m*|128|1536";; *) echo "m*|128|1.50K";; esac'
    commands(tmp_path, sbatch="echo 7", sinfo=exact)
    assert main(["submit", "--launcher=pmi2", "--nodes=1536", "train.py"]) == 0
    assert "submitted job 7" in capsys.readouterr().out
    assert main(["submit", "--launcher=pmi2", "--nodes=1537", "train.py"]) == 2
    assert "1536 of 128 CPUs" in capsys.readouterr().err


def commands(tmp_path, **programs):
    """Put commands of SLURM in the only folder of PATH."""
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)


def test_nodes_of_a_partition_are_counted_by_their_own_sizes(capsys, tmp_path):
    """Unless told otherwise, sinfo lumps nodes of 32 and of 64 CPUs together as 32+."""
    exact = 'case "$*" in *--exact*) echo "m*|32|10"; echo "m*|64|10";; *) echo "m*|32+|20";; esac'
    commands(tmp_path, sbatch="echo 7", sinfo=exact)
    assert main(["submit", "--launcher=pmi2", "-N", "10", "--tasks-per-node=64", "train.py"]) == 0
    assert main(["submit", "--launcher=pmi2", "-N", "11", "--tasks-per-node=64", "train.py"]) == 2
    assert "10 of 32 CPUs, 10 of 64 CPUs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "env"),
    [
        (["--extra=--partition=big"], {}),
        (["--extra=-pbig"], {}),
        (["--extra=--qos=x -M other"], {}),
        (["--extra=--clusters=other"], {}),
        (["--qos=x"], {}),
        (["--constraint=fast"], {}),
        (["--gpus-per-node=4"], {}),
        (["--extra=--gres=gpu:1"], {}),
        (["--extra=-Cfast"], {}),
        ([], {"SBATCH_PARTITION": "big"}),
        ([], {"SBATCH_CLUSTERS": "other"}),
        (["--partition=m"], {"SBATCH_CLUSTERS": "other"}),
    ],
)
def test_the_default_partition_says_nothing_of_jobs_that_go_elsewhere(
    capsys, tmp_path, monkeypatch, words, env
):
    commands(tmp_path, sbatch="echo 7", sinfo='echo "m*|4|1"')
    many = ["submit", "--launcher=pmi2", "--nodes=9"]
    assert main([*many, "train.py"]) == 2
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert main([*many, *words, "train.py"]) == 0
    assert "submitted job 7" in capsys.readouterr().out


MIXED = "m*|64|9|(null)\nm*|32|1|(null)\nbig|128|8|(null)\ngpu|96|4|gpu:a100:8(S:0-1)\n"


@pytest.mark.parametrize(
    ("words", "rows", "cpus", "reason"),
    [
        ([], "m*|64|10|(null)", 64, "64, because a node has 64; --cpus-per-task sets another"),
        (["--tasks-per-node=4"], "m*|64|10|(null)", 16, "16, because a node has 64;"),
        (["--tasks-per-node=3"], "m*|64|10|(null)", 21, "21, because a node has 64;"),
        ([], MIXED, 32, "32, because the smallest node has 32;"),
        (["--partition=big"], MIXED, 128, "128, because a node has 128;"),
        (["--account=me"], MIXED, 32, "32, because the smallest node has 32;"),
        (["--gpus-per-node=8", "-n8"], MIXED, 12, "12, because a node has 96;"),
        (["-G2", "-n2"], MIXED, 12, "because a node has 96, and the job takes 2 of its 8 GPUs"),
        (["-G2", "-n2"], "m*|64|10|gpu:4", 16, "and the job takes 2 of its 4 GPUs;"),
        (["--tasks-per-node=99", "--extra=--overcommit"], MIXED, 1, "1, because the smallest"),
        (["--cpus-per-task=3"], MIXED, 3, "3, as requested"),
        (["--site=three.toml"], MIXED, 3, "3, as requested"),
        (["--extra=-c 5"], MIXED, 1, "as --extra requests"),
        (["--extra=--partition=big"], MIXED, 1, "1, because sinfo does not list the nodes"),
        (["--partition=nosuch"], MIXED, 1, "1, because sinfo does not list the nodes"),
        ([], "m*|32+|10|(null)", 1, "1, because sinfo does not list the nodes"),
    ],
)
def test_a_rank_gets_its_share_of_the_cpus_of_a_node(capfd, tmp_path, words, rows, cpus, reason):
    commands(tmp_path, sbatch="/usr/bin/cat >script; echo 7", sinfo=f"echo '{rows}'")
    Path("three.toml").write_text("cpus_per_task = 3\n")
    assert main(["submit", "--launcher=pmi2", *words, "train.py"]) == 0
    (summary,) = re.findall(r"CPUs of each rank: (.*)\)$", capfd.readouterr().out, re.MULTILINE)
    assert reason in summary
    assert f"--cpus-per-task={cpus}" in directives(Path("script").read_text())


@pytest.mark.parametrize("sinfo", ["exit 1", None])
def test_without_sinfo_a_rank_gets_one_cpu(capfdbinary, tmp_path, sinfo):
    commands(tmp_path, **({"sinfo": sinfo} if sinfo else {}))
    text, err = dry(capfdbinary, "--launcher=pmi2", "train.py")
    assert "--cpus-per-task=1" in directives(text)
    assert "CPUs of each rank: 1, because sinfo does not list the nodes; --cpus-per" in err


def test_a_dry_run_asks_for_the_cpus_that_the_job_will_ask_for(capfdbinary, tmp_path):
    commands(tmp_path, sinfo="echo 'm*|64|9|(null)'")
    text, err = dry(capfdbinary, "--launcher=pmi2", "--tasks-per-node=2", "train.py")
    assert "--cpus-per-task=32" in directives(text)
    assert "CPUs of each rank: 32, because a node has 64" in err


def test_what_sbatch_says_beside_the_number_is_kept_apart_from_it(capsys, tmp_path):
    commands(tmp_path, sbatch='echo "Welcome to the site"; echo "12;gpu"; echo "moved" >&2')
    assert main(["submit", "--launcher=pmi2", "train.py"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("submitted job 12 (")
    assert err == "moved\n"
    (line,) = Path("runs/slurm/jobs.jsonl").read_text().splitlines()
    assert json.loads(line)["client"] == {"SLURM_CLUSTERS": "gpu"}


def test_an_answer_without_a_number_is_told(capsys, tmp_path):
    commands(tmp_path, sbatch='echo "Welcome to the site"')
    assert main(["submit", "--launcher=pmi2", "train.py"]) == 2
    err = capsys.readouterr().err
    assert "but said 'Welcome to the site'; `squeue --me` lists it" in err


def test_the_users_folder_has_its_short_name(capfdbinary, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    words = ["--logs=~/logs", "--python=~/v/bin/python", "--launcher=pmi2", "train.py"]
    text, _ = dry(capfdbinary, *words)
    assert "--output=/home/me/logs/%x-%j.out" in directives(text)
    assert "/home/me/v/bin/python -m mpi4py" in text


SAID = "sbatch: error: Batch job submission failed: "


@pytest.mark.parametrize(
    ("said", "parts"),
    [
        (
            "sbatch: error: CPU count per node can not be satisfied\n"
            f"{SAID}Requested node configuration is not available\n",
            ["able to hold the job", "--nodes=2", "--mem=9G", "ask for less"],
        ),
        (f"{SAID}Invalid partition specified: p\n", ["partition must be", "--partition=p"]),
        (
            "sbatch: error: invalid partition specified: p\n"
            f"{SAID}Invalid partition name specified\n",
            ["'Invalid partition name specified'", "--partition=p", "sinfo -s"],
        ),
        (
            f"{SAID}Invalid account or account/partition combination specified\n",
            ["the account must be yours", "--account=a --partition=p", "sacctmgr show assoc"],
        ),
        (
            "sbatch: error: QOSMaxSubmitJobPerUserLimit\n"
            f"{SAID}Job violates accounting/QOS policy (job submit limit, user's size and/or time "
            "limits)\n",
            ["within the limits", "--time=30 --account=a --qos=q", "wait for your other jobs"],
        ),
        (f"{SAID}Invalid qos specification\n", ["--qos=q"]),
        (f"{SAID}Invalid feature specification\n", ["--constraint=c"]),
        (f"{SAID}Job dependency problem\n", ["--dependency=afterok:1"]),
        (
            f"{SAID}Invalid generic resource (gres) specification\n",
            ["--gpus-per-node=3", "--gpu-request=gres"],
        ),
        (
            f"{SAID}Requested time limit is invalid (missing or exceeds some limit)\n",
            ["--time=30", "sinfo"],
        ),
        (f"{SAID}Unable to contact slurm controller (connect failure)\n", ["scontrol ping"]),
        (
            "sbatch: fatal: Could not establish a configuration source\n",
            ["controller must answer", "--site"],
        ),
        (
            "sbatch: unrecognized option '--nosuch=3'\nTry \"sbatch --help\" for more\n",
            ["--nosuch=3", "option that it names"],
        ),
        ("", ["'nothing'"]),
    ],
)
def test_a_refusal_of_sbatch_is_one_line_with_rule_value_and_remedy(said, parts):
    asked = job(
        nodes=2,
        mem="9G",
        partition="p",
        account="a",
        qos="q",
        time="30",
        constraint="c",
        dependency="afterok:1",
        gpus_per_node=3,
    )
    text = explain(said, asked)
    assert "\n" not in text
    assert all(part in text for part in parts)


def _sbatch_that_says_7(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho 7\n")
    (tmp_path / "bin" / "sbatch").chmod(0o755)


def test_a_job_that_is_submitted_is_told_of_though_it_cannot_be_kept(capsys, tmp_path, monkeypatch):
    _sbatch_that_says_7(tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert main(["submit", "--launcher=pmi2", "train.py"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("submitted job 7 ")
    assert err.startswith("daso: job 7 runs, but ")
    assert "No space left on device" in err


def test_the_command_to_follow_names_a_profiles_folder(capsys, tmp_path):
    _sbatch_that_says_7(tmp_path)
    (tmp_path / "mine.toml").write_text('logs = "else where"\n')
    assert main(["submit", "--site=mine.toml", "--launcher=pmi2", "train.py"]) == 0
    assert "follow it: daso logs --follow --logs 'else where' 7\n" in capsys.readouterr().out
