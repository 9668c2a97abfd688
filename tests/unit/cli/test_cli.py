import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from jobs import HANG_SECONDS

import daso
from daso.cli.main import carry_out, main
from daso.cli.outputs import exit_on_broken_pipe
from daso.cli.parser import Parser
from daso.cli.train.config import Config
from daso.cli.train.keys import describe
from daso.environment import find_mpirun
from daso.errors import CheckpointError, CheckpointWriteError, TopologyError

LAUNCHERS = ("PMI", "OMPI_", "PRTE_", "SLURM_", "DASO_")
REAL_MPIRUN = find_mpirun()


@pytest.fixture(autouse=True)
def outside(monkeypatch):
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def mpirun(outside, tmp_path, monkeypatch):
    """Put a script in the place of mpirun that writes down what it was asked for."""
    path = tmp_path / "fake" / "mpirun"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> {path}.words\nenv > {path}.env\nexit 5\n')
    path.chmod(0o755)
    monkeypatch.setenv("DASO_MPIRUN", str(path))
    monkeypatch.chdir(tmp_path)  # where a run folder would be made
    for name in ("train.py", "a.py"):
        (tmp_path / name).touch()
    words, env = path.with_suffix(".words"), path.with_suffix(".env")
    return SimpleNamespace(
        path=path,
        started=words.exists,
        words=lambda: words.read_text().split("\n")[:-1],
        env=lambda: env.read_text().splitlines(),
    )


@pytest.fixture
def trained(monkeypatch):
    """Keep the configurations that would be trained."""
    kept = []

    def train(config, *, resume):
        kept.append(replace(config, name=f"{config.name}, resumed") if resume else config)
        return {"steps": 1}

    monkeypatch.setattr("daso.cli.train.loop.train", train)
    return kept


def command(*words, env=None, timeout=HANG_SECONDS):
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | (env or {})
    words = [sys.executable, "-m", "daso", *words]
    return subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


def wrong_use(capsys, *words):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    return capsys.readouterr().err


def flags(text):
    """Return the flags of a help text's own list, up to the settings."""
    lines = text.split("settings, with defaults")[0].splitlines()
    own = [line.split("  ")[1] for line in lines if line.startswith("  -")]
    return {word for line in own for word in line.replace(",", "").split() if word[0] == "-"}


def help_of(capsys, *words):
    with pytest.raises(SystemExit) as caught:
        main([*words, "--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_the_flags_of_every_command_are_these_and_no_others(capsys):
    ranks = {"-h", "--help", "-n", "--ranks", "--ranks-per-node"}
    again = {"--restarts", "--spares"}
    assert flags(help_of(capsys)) == {"-h", "--help", "--version"}
    assert flags(help_of(capsys, "run")) == ranks | again | {"--elastic", "--fault"}
    assert flags(help_of(capsys, "train")) == ranks | again | {"--resume"}
    assert flags(help_of(capsys, "doctor")) == {
        "-h",
        "--help",
        "--json",
        "--link",
        "--nodes",
        "--parameters",
    }
    planned = {"--budget", "--second", "--policy", "--units", "--plot", "--json"}
    assert flags(help_of(capsys, "memory")) == {"-h", "--help"} | planned
    assert flags(help_of(capsys, "trace")) == {"-h", "--help", "--chrome", "--json", "--plot"}
    assert flags(help_of(capsys, "status")) == {"-h", "--help", "--json", "--logs", "--site"}
    assert flags(help_of(capsys, "logs")) == {"-h", "--help", "--follow", "--logs"}


def test_doctor_says_how_many_nodes_would_exchange(capsys):
    assert main(["doctor", "--nodes=256", "--parameters=25e6", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["algorithm"] for row in rows] == ["auto", "direct", "two-level", "halving", "ring"]
    assert [row["plan"] for row in rows[1:]] == [
        "direct",
        "16 x 16",
        " x ".join("22222222"),
        "ring",
    ]
    assert rows[0]["messages"] < rows[1]["messages"] / 4
    assert main(["doctor", "--nodes=256"]) == 0
    assert "50.0 MB of bf16 over 256 nodes" in capsys.readouterr().out
    assert main(["doctor", "--nodes=256", "--parameters=25e6", "--json", "--link=100mbit"]) == 0
    slow = json.loads(capsys.readouterr().out)
    assert all(
        9 < a["seconds"] / b["seconds"] < 10 for a, b in zip(slow[2:4], rows[2:4], strict=True)
    )
    assert main(["doctor", "--nodes=2", "--link=none"]) == 2
    assert "--link must be a rate such as 10gbit, not 'none'" in capsys.readouterr().err
    assert main(["doctor", "--nodes=1"]) == 2
    assert (
        "--nodes must be a whole number of at least 2 and at most 100000, not 1"
        in capsys.readouterr().err
    )


def test_help_lists_the_commands(capsys):
    text = help_of(capsys)
    lines = [line.split()[0] for line in text.splitlines() if line.startswith("    ")]
    ours = "run train submit status logs bench predict memory trace doctor complete"
    assert lines == ours.split()


@pytest.mark.parametrize(
    "closed",
    [
        *(pytest.param(one, marks=pytest.mark.later("another stream")) for one in [(1,), (2,)]),
        (0, 1, 2),
    ],
)
def test_closed_streams_and_python_without_docstrings(tmp_path, closed):
    """``daso run x >&-``, and PYTHONOPTIMIZE=2 on ranks too."""
    program = tmp_path / "notes.py"
    program.write_text(
        "import pathlib, daso\nrank = daso.init().rank\nprint('to nowhere')\n"
        "pathlib.Path(__file__).with_name(f'rank-{rank}').write_text('was here')\n"
    )
    shut = " ".join(f"{number}>&-" for number in closed)
    command = f"{sys.executable} -m daso run -n 2 {program} {shut}"
    run = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "DASO_MPIRUN": str(REAL_MPIRUN), "PYTHONOPTIMIZE": "2"},
        timeout=HANG_SECONDS,
        check=False,
    )
    assert run.returncode == 0
    assert {path.name for path in tmp_path.glob("rank-*")} == {"rank-0", "rank-1"}


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "daso", "doctor", "--nodes=4"],
        ["-m", "daso", "predict", "--parameters=1e6", "--step-ms=9", "--nodes=2", "--steps=400"],
    ],
)
def test_a_reader_that_leaves_ends_a_command_without_a_word(words):
    """``daso predict ... | head -1``: as programs end by SIGPIPE."""
    reads, writes = os.pipe()
    os.close(reads)
    try:
        run = subprocess.run(
            [sys.executable, *words],
            stdout=writes,
            stderr=subprocess.PIPE,
            text=True,
            timeout=HANG_SECONDS,
            check=False,
        )
    finally:
        os.close(writes)
    assert (run.returncode, run.stderr) == (128 + signal.SIGPIPE, "")


def test_a_pipe_that_others_broke_is_no_reader_that_left():
    def act():
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        exit_on_broken_pipe(act)


def test_what_other_launchers_left_in_the_environment_is_no_matter(tmp_path):
    """A shell within a job, or within a rank: Open MPI's variables, PMI's and SLURM's."""
    program = tmp_path / "who.py"
    program.write_text(
        "import daso; topology = daso.init(); print(topology.rank, topology.world_size)\n"
    )
    slurm = {"JOB_ID": "77", "JOBID": "77", "NNODES": "2", "NTASKS": "2", "TASKS_PER_NODE": "1(x2)"}
    slurm |= dict.fromkeys(("NODELIST", "JOB_NODELIST"), "far[0-1]")
    left = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0", "PMI_FD": "9"}
    left |= {f"SLURM_{name}": value for name, value in slurm.items()}
    run = subprocess.run(
        [sys.executable, "-m", "daso", "run", "-n", "2", str(program)],
        env={**os.environ, "DASO_MPIRUN": str(REAL_MPIRUN), **left},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert sorted("".join(run.stdout.split())) == ["0", "1", "2", "2"]


def test_help_of_train_lists_every_setting_as_describe_does(capsys):
    assert help_of(capsys, "train").rstrip().endswith(describe())


def test_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"daso {daso.__version__}\n"


def test_the_installed_command_is_this_one():
    found = command("--version")
    assert (found.returncode, found.stdout) == (0, f"daso {daso.__version__}\n")


@pytest.mark.parametrize(
    "words",
    [
        *(["--help"], ["train", "--help"], ["train", "--nosuch=1"]),
        *(["submit", "--help"], ["submit", "--dry-run", "-m", "daso", "train"]),
        *(["memory", "--help"], ["memory", "--polcy", "search", "train.py"]),
    ],
)
def test_help_and_refusals_load_neither_torch_nor_mpi(words):
    script = (
        "import sys; from daso.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print('loaded', sorted({'torch', 'mpi4py', 'mpi4py.MPI'} & set(sys.modules)))"
    )
    words = [sys.executable, "-c", script, *words]
    run = subprocess.run(words, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert run.stdout.splitlines()[-1] == "loaded []"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "COMMAND"),
        (["trian"], "'trian'"),
        (["run", "--rnks=2", "train.py"], "--rnks=2"),
        (["doctor", "--jsn"], "--jsn"),
        (["doctor", "--js"], "--js"),
        (["doctor", "now"], "now"),
        (["run", "-n", "two", "train.py"], "'two'"),
        (["train", "-n", "2.5"], "'2.5'"),
        (["--verbose", "doctor"], "--verbose"),
    ],
)
def test_wrong_words_are_named_and_start_nothing(capsys, mpirun, words, named):
    assert named in wrong_use(capsys, *words)
    assert not mpirun.started()


def test_an_unknown_command_is_told_with_those_there_are(capsys):
    err = wrong_use(capsys, "trian")
    listed = err.partition("choose from")[2].replace("'", "")  # not all Pythons quote
    assert all(f" {known}," in listed for known in ("run", "train", "doctor"))


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["train", "--nosuch=1"], ["'nosuch'", "valid keys"]),
        (["train", "-n", "2", "--nosuch=1"], ["'nosuch'", "valid keys"]),
        (["train", "--epoch=1"], ["did you mean 'epochs'?"]),
        (["train", "--epochs=x", "-n", "2"], ["whole number", "'x'"]),
        (["train", "nosuch.toml", "-n", "2"], ["nosuch.toml", "No such file"]),
        (["train", "--epochs"], ["--key=value", "'--epochs'"]),
        (["train", "-n", "0"], ["at least 1", "not 0"]),
        (["train", "-n", "-1"], ["at least 1", "not -1"]),
        (["train", "-n", "2", "--ranks-per-node", "x"], ["'x'", "3,1"]),
        (["train", "--ranks-per-node", "0"], ["'0'", "positive number"]),
        (["run", "--ranks-per-node", "x", "train.py"], ["'x'", "3,1"]),
        (["run", "-n", "0", "train.py"], ["at least 1", "not 0"]),
        (["run", "-n", "2"], ["a program must follow", "daso run -n 4 train.py"]),
        (["run", "--"], ["a program must follow"]),
        (["run", "-n", "2", "nosuch.py"], ["there is no 'nosuch.py' in", "mend its path"]),
    ],
)
def test_wrong_values_exit_2_with_one_line_and_start_nothing(capsys, mpirun, trained, words, parts):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("daso: ")
    assert err.count("\n") == 1
    assert all(part in err for part in parts)
    assert not mpirun.started()
    assert trained == []


@pytest.mark.parametrize("words", [["train", "--nosuch=1"], ["train", "-n", "2", "--nosuch=1"]])
def test_unknown_key_prints_one_line(mpirun, words):
    found = command(*words)
    assert found.returncode == 2
    assert found.stdout == ""
    assert found.stderr.startswith("daso: unknown key 'nosuch'")
    assert found.stderr.count("\n") == 1
    assert not mpirun.started()


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (["--epochs", "3"], {"epochs": 3}),
        (["--trace", "--epochs", "3"], {"epochs": 3, "trace": True}),
        (["--name", "x", "--trace"], {"name": "x", "trace": True}),
        (["--trace=false", "--seed", "7"], {"seed": 7}),
    ],
)
def test_a_settings_value_may_be_the_next_word(trained, words, changed):
    assert main(["train", *words]) == 0
    assert trained == [replace(Config(), **changed)]


@pytest.mark.parametrize("words", [["--epochz", "3"], ["--trace", "--nosuch"]])
def test_a_setting_that_is_none_is_told_however_it_is_written(capsys, trained, words):
    assert main(["train", *words]) == 2
    assert "unknown key" in capsys.readouterr().err
    assert trained == []


def test_wrong_ranks_per_node_in_the_environment_leave_one_line(capsys, monkeypatch, trained):
    monkeypatch.setenv("DASO_RANKS_PER_NODE", "x")
    assert main(["train"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("daso: ")
    assert "positive number" in err
    assert err.count("\n") == 1
    assert trained == []


def test_only_the_first_of_many_ranks_tells_of_an_error(capsys, monkeypatch):
    daso.init()  # a world of one: what its rank is says nothing of the launcher's
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "1")
    assert main(["train", "--nosuch=1"]) == 2
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("PMI_RANK", "0")
    assert main(["train", "--nosuch=1"]) == 2
    assert "'nosuch'" in capsys.readouterr().err


@pytest.mark.parametrize(("local_rank", "met"), [("0", False), ("1", False), ("0", True)])
def test_lone_error_is_printed_before_ranks_meet(capsys, monkeypatch, local_rank, met):
    """A file may be there on the host of rank 0 alone: the others end, and nobody said why."""
    monkeypatch.setattr("daso.comm.mpi.OTHERS_SECONDS", 0.01)
    monkeypatch.setattr("daso.comm.topology._default", {})
    if met:
        daso.init()
    for name, value in {"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALRANKID": local_rank}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "not_there.toml"]) == 2
    err = capsys.readouterr().err
    if local_rank == "0" and not met:
        assert err.startswith(f"daso: rank 2 on {socket.gethostname()}: ")
        assert "not_there.toml" in err
        assert err.count("\n") == 1
    else:
        assert err == ""


@pytest.mark.parametrize(
    ("words", "ranks", "program"),
    [
        (["train.py"], "1", ["train.py"]),
        (["-n", "2", "train.py"], "2", ["train.py"]),
        (["-n2", "train.py"], "2", ["train.py"]),
        (["--ranks=3", "train.py", "-n", "4"], "3", ["train.py", "-n", "4"]),
        (["train.py", "--ranks-per-node=x", "-h"], "1", ["train.py", "--ranks-per-node=x", "-h"]),
        (["train.py", "--lr=1", "a b", ""], "1", ["train.py", "--lr=1", "a b", ""]),
        (["-n", "2", "--", "train.py", "--lr"], "2", ["train.py", "--lr"]),
        (["-n", "2", "train.py", "--", "x"], "2", ["train.py", "--", "x"]),
        (["-m", "pack.mod"], "1", ["-m", "pack.mod"]),
        (["-n", "2", "-m", "pack.mod", "--lr=1"], "2", ["-m", "pack.mod", "--lr=1"]),
        (["-n", "2", "--", "-m", "pack.mod"], "2", ["-m", "pack.mod"]),
    ],
)
def test_run_passes_the_program_and_all_behind_it_on(mpirun, words, ranks, program):
    assert main(["run", *words]) == 5
    assert mpirun.words() == ["-n", ranks, sys.executable, "-m", "mpi4py", *program]


@pytest.mark.parametrize("words", [["run", "-n", "2", "train.py"], ["train", "-n", "2"]])
def test_the_exit_code_of_the_job_is_that_of_the_command(mpirun, words):
    found = command(*words)
    assert found.returncode == 5
    assert found.stderr == "daso: the job ended with exit code 5\n"
    assert mpirun.started()


@pytest.mark.parametrize("words", [["run", "--ranks-per-node=3,1", "a.py"], ["train", "-n", "2"]])
def test_pretend_nodes_reach_the_ranks_only_when_asked_for(mpirun, words):
    main(words)
    asked = [line for line in mpirun.env() if line.startswith("DASO_RANKS_PER_NODE")]
    assert asked == (["DASO_RANKS_PER_NODE=3,1"] if "run" in words else [])


def test_train_on_several_ranks_starts_itself_again_with_file_and_settings(mpirun, tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text("epochs = 2\n")
    words = ["train", "-n", "4", "--ranks-per-node=2", str(path), "--seed=3", "--name=a b"]
    again = ["-m", "daso", "train", str(path), "--seed=3", "--name=a b"]
    assert main(words) == 5
    assert mpirun.words() == ["-n", "4", sys.executable, "-m", "mpi4py", *again]


@pytest.mark.parametrize("at", [1, 3, 5])
def test_resume_is_a_flag_anywhere_and_goes_along(mpirun, tmp_path, trained, at):
    words = ["train", "-n", "2", "--seed=3", "--name=a b"]
    words.insert(at, "--resume")
    assert main(words) == 5
    assert mpirun.words()[5:] == ["-m", "daso", "train", "--resume", "--seed=3", "--name=a b"]
    assert main(["train", "--resume"]) == 0
    assert trained == [Config(name="train, resumed")]


def test_train_for_pretend_nodes_of_one_rank_goes_through_mpirun(mpirun, trained):
    assert main(["train", "--ranks-per-node", "1"]) == 5
    assert "DASO_RANKS_PER_NODE=1" in mpirun.env()
    assert trained == []


@pytest.mark.parametrize("words", [["train"], ["train", "-n", "1"]])
def test_train_on_one_rank_trains_here(mpirun, trained, words):
    assert main(words) == 0
    assert trained == [Config()]
    assert not mpirun.started()


@pytest.mark.parametrize("first", [True, False])
def test_the_file_may_stand_before_or_behind_the_settings(tmp_path, trained, first):
    path = tmp_path / "settings.toml"
    path.write_text("epochs = 2\nseed = 4\n")
    words = [str(path), "--epochs=7"] if first else ["--epochs=7", str(path)]
    assert main(["train", *words]) == 0
    assert trained == [Config(epochs=7, seed=4)]


@pytest.mark.parametrize("text", ["my run", "a=b", "--ranks", "-1", "ä ö", "x.toml y", "%d %"])
def test_a_text_setting_may_be_any_text(trained, text):
    assert main(["train", f"--name={text}"]) == 0
    assert trained == [Config(name=text)]


def launched(monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "0")


def test_train_inside_a_launcher_trains(monkeypatch, mpirun, trained):
    launched(monkeypatch)
    assert main(["train", "--epochs=1"]) == 0
    assert trained == [Config(epochs=1)]
    assert not mpirun.started()


@pytest.mark.parametrize("words", [["-n", "2"], ["--ranks-per-node", "1"]])
def test_train_inside_a_launcher_starts_no_ranks_of_its_own(monkeypatch, mpirun, trained, words):
    launched(monkeypatch)
    main(["train", *words])
    assert not mpirun.started()


def test_ranks_inside_a_launcher_are_refused_with_what_to_leave_out(monkeypatch, capsys, trained):
    launched(monkeypatch)
    assert main(["train", "-n", "2"]) == 2
    assert "leave them out" in capsys.readouterr().err
    assert trained == []


def test_an_error_of_daso_while_training_leaves_one_line(monkeypatch, capsys):
    def fail(config, *, resume):
        raise TopologyError("the nodes must agree, not differ; mend them")

    monkeypatch.setattr("daso.cli.train.loop.train", fail)
    assert main(["train"]) == 2
    assert capsys.readouterr().err == "daso: the nodes must agree, not differ; mend them\n"


def test_an_error_that_is_not_ours_keeps_its_traceback(monkeypatch):
    def fail(config, *, resume):
        raise ZeroDivisionError

    monkeypatch.setattr("daso.cli.train.loop.train", fail)
    with pytest.raises(ZeroDivisionError):
        main(["train"])


def test_run_starts_real_ranks_on_pretend_nodes(tmp_path):
    script = tmp_path / "show.py"
    script.write_text(
        "import sys, daso\n"
        "topology = daso.init()\n"
        "line = f'{topology.rank} {topology.world_size} {topology.nodes} {sys.argv[1]}\\n'\n"
        "sys.stdout.write(line)  # at once, or mpirun mixes the ranks' pieces\n"
    )
    words = ("run", "-n", "2", "--ranks-per-node=1", str(script), "--x=1")
    found = command(*words, env={"DASO_MPIRUN": str(REAL_MPIRUN)})
    assert found.returncode == 0, found.stderr
    assert sorted(found.stdout.splitlines()) == ["0 2 2 --x=1", "1 2 2 --x=1"]


@pytest.mark.later("starts ranks")
def test_train_on_two_pretend_nodes_ends_with_equal_ranks_and_a_summary(tmp_path):
    words = ("train", "-n", "2", "--ranks-per-node=1", "--data.name=digits", "--epochs=1")
    found = command(*words, f"--runs={tmp_path}", env={"DASO_MPIRUN": str(REAL_MPIRUN)})
    assert found.returncode == 0, found.stderr
    summary = json.loads((tmp_path / "train" / "summary.json").read_text())
    assert (summary["world"], summary["nodes"], summary["identical"]) == (2, 2, True)
    assert summary["test_accuracy"] > 0.5
    assert "yes, bit for bit" in found.stdout
    assert f"{tmp_path}/train/" in found.stdout


@pytest.mark.parametrize(("kind", "code"), [(CheckpointWriteError, 1), (CheckpointError, 2)])
def test_what_may_go_well_another_time_is_told_from_wrong_use(capsys, kind, code):
    def run(*_):
        raise kind("a disk was away")

    parser = Parser(prog="daso")
    parser.set_defaults(run=run)
    assert carry_out(parser, []) == code
    assert "a disk was away" in capsys.readouterr().err
