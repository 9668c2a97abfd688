import shutil
import subprocess
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import HANG_SECONDS

from daso.errors import ConfigError
from daso.slurm.job import Job, name_of, options, quote, render
from daso.slurm.launcher import Launcher
from daso.slurm.sites import read_template

PMI2 = Launcher("pmi2", "MPICH", "the MPI library is MPICH")
MPIRUN = Launcher("mpirun", "Open MPI", "as asked for")
PLAIN = Job(program=("train.py",), launcher=PMI2, chdir=Path("/data/run"), python="/opt/bin/python")
FULL = replace(
    PLAIN,
    program=("-m", "pack.mod", "--lr=0.1", "a b", "$HOME", "it's"),
    site="here",
    name="long-run",
    nodes=4,
    tasks_per_node=2,
    cpus_per_task=3,
    gpus_per_node=2,
    gpu_bind="closest",
    mem="64G",
    time="1-12:00:00",
    partition="gpu,big",
    account="abc_g",
    qos="regular",
    constraint="gpu&hbm80g",
    network="disable_rdzv_get",
    exclusive=True,
    array="0-9%2",
    dependency="afterany:123",
    signal_seconds=300,
    max_restarts=7,
    restart_on_failure=3,
    container="/images/a b.sif",
    module=("GCC/12", "OpenMPI"),
    setup=("source venv/bin/activate", "export A=$HOME"),
    environment=("B=c d", "C=$x"),
    srun=("--cpu-bind=cores",),
    extra=("--reservation=now", "--nice=5 --hold"),
)
JOBS = {
    "plain": PLAIN,
    "mpirun": replace(PLAIN, launcher=MPIRUN, mpirun="/opt/bin/mpirun", root=True),
    "full": FULL,
    "full mpirun": replace(FULL, launcher=MPIRUN),
    "login": replace(PLAIN, login_shell=True),
    "odd words": replace(PLAIN, program=("train.py", "", "a\nb", "\r", "-", "'\"\\`!#", "é")),
    "odd folder": replace(PLAIN, chdir=Path("/data/it's 100% mine")),
}


def script(job):
    text, name = read_template(None)
    return render(job, text, name=name)


def directives(text):
    return [line[8:] for line in text.splitlines() if line.startswith("#SBATCH ")]


every_job = pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)


@every_job
def test_every_script_is_one_that_bash_can_read(job):
    run = subprocess.run(
        ["bash", "-n"], input=script(job), capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")


@every_job
@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck on this machine")
def test_every_script_is_one_that_shellcheck_likes(job):
    # 1091: a file of the user's is not there; 2016: $ in single quotes is the user's own text.
    words = ["shellcheck", "-s", "bash", "-e", "1091,2016", "-"]
    run = subprocess.run(words, input=script(job), capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "")


@every_job
def test_the_text_is_the_same_whenever_it_is_made(job):
    assert script(job) == script(replace(job))


@every_job
def test_nothing_but_comments_stands_before_the_directives(job):
    lines = script(job).splitlines()
    last = max(at for at, line in enumerate(lines) if line.startswith("#SBATCH "))
    assert all(line.startswith("#") for line in lines[: last + 1])
    assert lines[0].startswith("#!/bin/bash")


def test_every_option_comes_as_its_directive():
    assert directives(script(FULL)) == [
        "--job-name=long-run",
        "--nodes=4",
        "--ntasks-per-node=2",
        "--cpus-per-task=3",
        "--gpus-per-node=2",
        "--gpu-bind=closest",
        "--mem=64G",
        "--time=1-12:00:00",
        "--partition=gpu,big",
        "--account=abc_g",
        "--qos=regular",
        "--constraint=gpu&hbm80g",
        "--network=disable_rdzv_get",
        "--array=0-9%2",
        "--dependency=afterany:123",
        "--chdir=/data/run",
        "--output=/data/run/runs/slurm/%x-%A_%a.out",
        "--open-mode=append",
        "--signal=USR1@300",
        "--requeue",
        "--exclusive",
        "--reservation=now",
        "--nice=5 --hold",
    ]


def test_what_is_not_asked_for_is_not_there():
    assert directives(script(PLAIN)) == [
        "--job-name=daso",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--cpus-per-task=1",
        "--chdir=/data/run",
        "--output=/data/run/runs/slurm/%x-%j.out",
        "--open-mode=append",
        "--signal=USR1@120",
        "--requeue",
    ]


def test_every_option_changes_the_script():
    other = {
        **{name: getattr(FULL, name) for name in options()},
        "gpu_request": "gres",
        "container_command": "singularity exec",
        "container_gpu": "--rocm",
        "login_shell": True,
        "logs": "logs",
        "python": "python",
    }
    base = replace(PLAIN, gpus_per_node=1, container="image.sif")
    unchanged = [
        name for name in options() if script(replace(base, **{name: other[name]})) == script(base)
    ]
    assert unchanged == []


def test_gpus_can_be_asked_for_as_generic_resources():
    job = replace(PLAIN, gpus_per_node=4, gpu_request="gres")
    assert "--gres=gpu:4" in directives(script(job))
    assert "--gpu-bind=none" in directives(script(job))
    assert "gpus-per-node" not in script(job)


def test_srun_starts_the_ranks_with_all_cpus_and_signals_go_to_them():
    text = script(PLAIN)
    assert 'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"' in text
    assert 'export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"' in text
    assert (
        "srun --mpi=pmi2 --kill-on-bad-exit=1 /opt/bin/python -m mpi4py -m daso.slurm.rank_entry "
        "train.py || code=$?"
    ) in text
    assert "--signal=USR1@120" in text
    assert "trap" not in text


def test_mpirun_gets_the_number_of_ranks_its_environment_and_the_signal():
    job = replace(
        PLAIN, launcher=MPIRUN, nodes=2, tasks_per_node=3, mpirun="/opt/mpirun", root=True
    )
    text = script(job)
    assert (
        "/opt/mpirun --bind-to none -n 6 /opt/bin/python -m mpi4py "
        "-m daso.slurm.rank_entry train.py &"
    ) in text
    assert "--signal=B:USR1@120" in directives(text)
    assert "export SLURM_MPI_TYPE=none" in text
    # mpirun's own srun would ask for as many CPUs of a node as one rank has, and give it no more.
    assert "unset SRUN_CPUS_PER_TASK" in text
    assert "export SRUN_CPUS_PER_TASK" not in text
    assert "export SLURM_CPU_BIND=none" in text
    assert "export OMPI_ALLOW_RUN_AS_ROOT=1" in text
    assert "oversubscribe" not in text
    assert "srun" not in [line.split()[0] for line in text.splitlines() if line]


def test_modules_setup_and_variables_come_in_this_order_before_the_program():
    text = script(FULL)
    wanted = [
        *("set -e", "module load GCC/12", "module load OpenMPI", "source venv/bin/activate"),
        *("export A=$HOME", "export OMP_NUM_THREADS", "export B='c d'", "export C='$x'", "srun"),
    ]
    places = [text.index(f"\n{one}") for one in wanted]
    assert places == sorted(places)


def test_container_has_python_and_the_gpus_that_exist():
    job = replace(PLAIN, python="", container="a b.sif")
    start = "--kill-on-bad-exit=1 apptainer exec"
    assert f"{start} 'a b.sif' python3 -m mpi4py" in script(job)
    gpus = replace(job, gpus_per_node=1)
    assert f"{start} --nv 'a b.sif' python3 -m mpi4py" in script(gpus)
    amd = replace(gpus, container_gpu="--rocm", container_command="singularity exec --bind /x")
    assert "singularity exec --bind /x --rocm 'a b.sif' python3" in script(amd)
    podman = replace(gpus, container_gpu="--device nvidia.com/gpu=all")
    assert "apptainer exec --device nvidia.com/gpu=all 'a b.sif' python3" in script(podman)
    assert f"{start} 'a b.sif' python3" in script(replace(gpus, container_gpu=""))


@pytest.mark.parametrize("name", ["container_gpu", "container_command"])
def test_options_of_a_container_are_words_of_a_shell(name):
    with pytest.raises(ConfigError, match="must be words of a shell"):
        replace(PLAIN, **{name: "run 'a"})


def test_the_script_says_what_was_chosen_and_why():
    assert "# 1 node x 1 rank, srun --mpi=pmi2: the MPI library is MPICH.\n" in script(PLAIN)
    assert "for the site here" in script(FULL)


def test_restarts_are_limited_by_the_count_of_slurm():
    text = script(replace(PLAIN, max_restarts=7))
    assert 'restarts="${SLURM_RESTART_COUNT:-0}"' in text
    assert '[ "$restarts" -lt 7 ]' in text


# --- the script's own decisions, in bash, without SLURM -------------------------------------------


def run_script(job, tmp_path, program, env=None):
    """Run a script with shell functions in the place of SLURM's commands."""
    text = script(job).replace(
        "set -e\n", f'set -e\nscontrol() {{ echo scontrol "$@"; }}\n{program}', 1
    )
    base = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-2]"}
    run = subprocess.run(
        ["bash", "-s"],
        input=text,
        env={**base, "SLURM_CPUS_PER_TASK": "3", **(env or {})},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    return run.returncode, run.stdout.splitlines(), run.stderr


SRUN = "srun() {{ {}; }}\n"

# Ends a comment, a directive, a quoted word or a command, and then runs a program.
ESCAPES = ("{}", "\n{}\n", "\r\n{}\n", "$({})", "`{}`", "';{};'", '";{};"', "\u2028{}", "; {} #")
OWN_SHELL = ("setup",)  # lines of shell are what it is for


@pytest.mark.parametrize("escape", ESCAPES)
@pytest.mark.parametrize("launcher", [PMI2, MPIRUN])
def test_no_field_of_a_job_becomes_a_command(tmp_path, escape, launcher):
    """Whatever a name, a path, a site's profile or a program's word holds."""
    (tmp_path / "runs/slurm").mkdir(parents=True)
    mark = tmp_path / "mark"
    bad = escape.format(f"touch {mark}")
    texts = [one.name for one in fields(Job) if one.type is str] + ["chdir"]
    lists = [one.name for one in fields(Job) if one.type == tuple[str, ...]]
    made = 0
    for name in (*texts, *lists):
        if name in OWN_SHELL:
            continue
        value = Path(bad) if name == "chdir" else bad
        for one in ((value,), ("--x=" + bad,), ("X=" + bad,)) if name in lists else (value,):
            try:
                job = replace(replace(PLAIN, chdir=tmp_path, launcher=launcher), **{name: one})
            except ConfigError as error:
                assert "\n" not in str(error)
                continue
            made += 1
            run_script(job, tmp_path, "srun() { :; }\nmpirun() { :; }\nmodule() { :; }\n")
            assert not mark.exists(), (name, one)
    assert made > 2  # some fields take any text


@pytest.fixture
def job(tmp_path):
    (tmp_path / "runs/slurm").mkdir(parents=True)
    return replace(PLAIN, chdir=tmp_path)


@pytest.mark.parametrize("code", [0, 1, 3, 130])
def test_the_exit_code_of_the_program_is_that_of_the_job(job, tmp_path, code):
    found = run_script(job, tmp_path, SRUN.format(f"return {code}"))
    begin = "daso: job 12 on n[1-2], restart 0"
    assert found == (code, [begin, f"daso: job 12 ended with exit code {code}"], "")


@pytest.mark.parametrize("how", ["return 75", 'touch "$DASO_REQUEUE"; return 137'])
def test_a_program_that_saved_its_work_is_requeued(job, tmp_path, how):
    code, lines, _ = run_script(job, tmp_path, SRUN.format(how), {"SLURM_RESTART_COUNT": "2"})
    assert code == 75
    assert lines == [
        "daso: job 12 on n[1-2], restart 2",
        "daso: the program saved its work; requeueing job 12 for restart 3 of at most 100",
        "scontrol requeue 12",
    ]
    assert list((tmp_path / "runs/slurm").iterdir()) == []


def test_what_another_job_of_the_same_number_left_behind_does_not_count(job, tmp_path):
    (tmp_path / "runs/slurm/requeue-12-0").touch()
    code, lines, _ = run_script(job, tmp_path, SRUN.format("return 3"))
    assert (code, lines[1:]) == (3, ["daso: job 12 ended with exit code 3"])


def test_of_an_array_one_job_alone_is_requeued(job, tmp_path):
    """The last job of an array has the array's own number, which would requeue all of them."""
    env = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "0"}
    array = replace(job, array="0-3")
    _, lines, _ = run_script(array, tmp_path, SRUN.format("return 75"), env)
    assert lines[-1] == "scontrol requeue 12_0"


def test_the_last_restart_is_the_last(job, tmp_path):
    last = replace(job, max_restarts=2)
    program = SRUN.format("return 75")
    code, lines, _ = run_script(last, tmp_path, program, {"SLURM_RESTART_COUNT": "2"})
    assert code == 75
    assert "at most 2; submit again" in lines[1]
    assert lines[2:] == ["daso: job 12 ended with exit code 75"]


def test_a_job_that_fails_is_requeued_as_often_as_is_told(job, tmp_path):
    (tmp_path / "runs/slurm/failures-12-0").write_text("9\n")  # of an older job of this number
    again, program = replace(job, restart_on_failure=2), SRUN.format("return 137")
    for failure in (1, 2):
        env = {"SLURM_RESTART_COUNT": str(failure - 1)}
        code, lines, _ = run_script(again, tmp_path, program, env)
        assert code == 137
        assert lines[1:] == [
            f"daso: the program ended with exit code 137; requeueing job 12 after failure "
            f"{failure} of at most 2",
            "scontrol requeue 12",
        ]
    code, lines, _ = run_script(again, tmp_path, program, {"SLURM_RESTART_COUNT": "2"})
    assert (code, lines[1:]) == (137, ["daso: job 12 ended with exit code 137"])
    assert list((tmp_path / "runs/slurm").iterdir()) == []


def test_where_failures_cannot_be_counted_restarts_are(job, tmp_path):
    (tmp_path / "runs/slurm/failures-12-0").mkdir()  # nothing can be written there
    again, program = replace(job, restart_on_failure=2), SRUN.format("return 137")
    for restarts, requeued in (("0", True), ("1", True), ("2", False)):
        env = {"SLURM_RESTART_COUNT": restarts}
        code, lines, _ = run_script(again, tmp_path, program, env)
        assert (code, "scontrol requeue 12" in lines) == (137, requeued)


@pytest.mark.parametrize("code", [75, 137])
def test_a_log_on_a_full_disk_keeps_no_job_from_its_next_start(job, tmp_path, code):
    again, asked = replace(job, restart_on_failure=2), tmp_path / "asked"
    full = f'scontrol() {{ echo "$@" > {asked}; }}\n' + SRUN.format(
        f"exec > /dev/full; return {code}"
    )
    assert run_script(again, tmp_path, full)[0] == code
    assert asked.read_text() == "requeue 12\n"


@pytest.mark.parametrize("code", [0, 2])
def test_what_would_end_the_same_way_again_is_not_requeued(job, tmp_path, code):
    again = replace(job, restart_on_failure=2)
    found, lines, _ = run_script(again, tmp_path, SRUN.format(f"return {code}"))
    assert (found, lines[1:]) == (code, [f"daso: job 12 ended with exit code {code}"])


def test_a_job_that_cannot_be_requeued_says_so(job, tmp_path):
    program = SRUN.format("return 75") + "scontrol() { return 1; }\n"
    code, lines, _ = run_script(job, tmp_path, program)
    assert code == 75
    assert lines[-2:] == [
        "daso: job 12 could not be requeued; submit again to go on (daso train: with --resume)",
        "daso: job 12 ended with exit code 75",
    ]


def test_a_setup_line_that_fails_ends_the_job_before_the_program(job, tmp_path):
    found = run_script(replace(job, setup=("false",)), tmp_path, SRUN.format("echo ran"))
    assert found == (1, ["daso: job 12 on n[1-2], restart 0"], "")


def test_signals_to_the_script_reach_mpirun_and_its_exit_code_counts(job, tmp_path):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(
        "#!/bin/bash\ntrap 'echo got USR1; got=$((got + 1))' USR1\n"
        'kill -USR1 $PPID; while [ "$got" != 2 ]; do sleep 0.05\n'
        '[ "$got" != 1 ] || [ -n "$again" ] || { again=yes; kill -USR1 $PPID; }; done; exit 7\n'
    )
    mpirun.chmod(0o755)
    found = run_script(replace(job, launcher=MPIRUN, mpirun=str(mpirun)), tmp_path, "")
    lines = ["daso: job 12 on n[1-2], restart 0", "got USR1", "got USR1"]
    assert found == (7, [*lines, "daso: job 12 ended with exit code 7"], "")


words = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)


@settings(max_examples=150, deadline=None)
@given(program=st.lists(words, min_size=1, max_size=5), launcher=st.sampled_from([PMI2, MPIRUN]))
def test_any_words_of_a_program_reach_it_as_they_are(program, launcher):
    job = replace(PLAIN, program=tuple(program), launcher=launcher)
    text = script(job)
    begin = text.index("srun --mpi" if launcher is PMI2 else "mpirun --bind")
    end = text.index(" || code=$?\n" if launcher is PMI2 else " &\nsignalled=yes", begin)
    line = f'srun() {{ printf "%s\\0" "$@"; }}; mpirun() {{ srun "$@"; }}\n{text[begin:end]}'
    run = subprocess.run(["bash", "-s"], input=line.encode(), capture_output=True, check=True)
    found = run.stdout.decode().split("\0")[:-1]
    assert found[found.index("daso.slurm.rank_entry") + 1 :] == program
    assert "\r" not in text  # sbatch refuses a script with one


@given(words)
def test_quoting_leaves_no_control_characters(word):
    assert not any(ord(letter) < 32 for letter in quote(word))


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "time", ["30", "30:00", "0:30:00", "100:00:00", "1-0", "1-12", "1-12:30", "1-12:30:15", "0:5"]
)
def test_times_that_sbatch_takes(time):
    assert f"--time={time}" in directives(script(replace(PLAIN, time=time, signal_seconds=1)))


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        *(("5", 300), ("5:30", 330), ("0:05:30", 330), ("1-2", 93600), ("1-2:03", 93780)),
        *(("0-0:03", 180), ("1-0:0:5", 86405), ("2:0:0", 7200)),
    ],
)
def test_a_job_has_time_before_it_is_told_that_time_runs_out(time, seconds):
    """SLURM sends the signal at once else, and each restart would do as little as the first."""
    replace(PLAIN, time=time, signal_seconds=min(seconds - 1, 65535))
    if seconds <= 65535:
        with pytest.raises(ConfigError, match="longer than --signal-seconds") as caught:
            replace(PLAIN, time=time, signal_seconds=seconds)
        assert repr(time) in str(caught.value)


def test_no_time_limit_is_longer_than_any():
    for time in ("", "0"):
        assert replace(PLAIN, time=time, signal_seconds=65535).time == time


@pytest.mark.parametrize(
    "time",
    [
        *("30m", "1h", "1:2:3:4", "-5", "1-", "1-2-3", "1:60", "0:30:99", "1.5", "half an hour"),
        *("1-1:1:1:1", " 30", "30\n", "UNLIMITED", "12:", "٣٠"),
    ],
)
def test_times_that_it_does_not_take(time):
    with pytest.raises(ConfigError, match="--time must be M, M:S, H:M:S") as caught:
        replace(PLAIN, time=time)
    assert repr(time) in str(caught.value)


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"nodes": 0}, ["--nodes", "at least 1", "not 0"]),
        ({"tasks_per_node": -1}, ["--tasks-per-node", "at least 1", "not -1"]),
        ({"cpus_per_task": 0}, ["--cpus-per-task", "at least 1"]),
        ({"gpus_per_node": -2}, ["--gpus-per-node", "at least 0", "not -2"]),
        ({"signal_seconds": 70000}, ["--signal-seconds", "at most 65535", "70000"]),
        ({"max_restarts": -1}, ["--max-restarts", "at least 0"]),
        ({"restart_on_failure": -1}, ["--restart-on-failure", "at least 0"]),
        ({"name": "a b"}, ["--name", "'a b'", "letters"]),
        ({"name": "../x"}, ["--name", "'../x'"]),
        ({"mem": "lots"}, ["--mem", "'lots'", "64G"]),
        ({"array": "a-b"}, ["--array", "'a-b'", "0-9%2"]),
        ({"array": "0-9%0"}, ["--array", "'0-9%0'"]),
        ({"dependency": "123"}, ["--dependency", "'123'", "afterany:123"]),
        ({"partition": "a b"}, ["--partition", "'a b'", "one word"]),
        ({"account": "a\n#SBATCH --x"}, ["--account", "one word"]),
        ({"constraint": "a#b"}, ["--constraint", "'a#b'"]),
        ({"gpu_request": "gpus"}, ["--gpu-request", "'gpus'", "gres"]),
        ({"module": ("GCC; rm x",)}, ["--module", "'GCC; rm x'"]),
        ({"setup": ("a\nb",)}, ["--setup", "one line"]),
        ({"environment": ("A",)}, ["--environment", "'A'", "NAME=VALUE"]),
        ({"environment": ("1A=2",)}, ["--environment", "'1A=2'"]),
        ({"srun": ("cores",)}, ["--srun", "'cores'"]),
        ({"extra": ("reservation=x",)}, ["--extra", "'reservation=x'"]),
        ({"program": ()}, ["a program must follow", "daso submit"]),
        ({"program": ("a\0b",)}, ["zero bytes"]),
        ({"logs": "a\nb"}, ["single lines"]),
    ],
)
def test_wrong_values_are_told_in_one_line(values, parts):
    with pytest.raises(ConfigError) as caught:
        replace(PLAIN, **values)
    assert "\n" not in str(caught.value)
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize("array", ["0", "0-9", "1,3,5", "0-15:4", "0-9%2", "1,3-7:2%1"])
@pytest.mark.parametrize("dependency", ["afterok:1:2", "afterany:1,afterok:2", "singleton"])
def test_arrays_and_dependencies_that_sbatch_takes(array, dependency):
    found = directives(script(replace(PLAIN, array=array, dependency=dependency)))
    assert {f"--array={array}", f"--dependency={dependency}"} <= set(found)


def test_every_field_without_a_help_text_is_none_of_the_options():
    assert {one.name for one in fields(Job)} - options().keys() == {
        *("program", "launcher", "chdir", "root", "site", "mpirun")
    }


# --- templates ------------------------------------------------------------------------------------


def test_a_template_of_ones_own_may_use_every_key():
    text = "{{ nodes }} {{ ranks }} {{ command }}{% for line in directives %}{{ line }}{% endfor %}"
    found = render(replace(PLAIN, nodes=3), text, name="own.j2")
    assert found.startswith("3 3 srun --mpi=pmi2")


@pytest.mark.parametrize("text", ["{{ nodse }}", "{% if nodse %}x{% endif %}", "{{ nodse.x }}"])
def test_an_unknown_key_is_told_with_template_and_keys(text):
    with pytest.raises(ConfigError) as caught:
        render(PLAIN, text, name="own.j2")
    message = str(caught.value)
    assert "own.j2 uses nodse;" in message
    assert "cpus_per_task, " in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "text", ["{{ nodes", "{% for %}", "{{ nodes.x.y }}", "{% include 'x' %}", "{{ 1 / 0 }}"]
)
def test_a_template_that_is_none_is_told_in_one_line(text):
    with pytest.raises(ConfigError, match=r"own\.j2") as caught:
        render(PLAIN, text, name="own.j2")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (("train.py",), "train"),
        (("/a/b/my run.py", "x"), "my-run"),
        (("-m", "pack.mod", "x"), "pack.mod"),
        (("-m",), "-m"),
        (("",), "daso"),
        (("entra\N{LATIN SMALL LETTER I WITH CIRCUMFLEX}nement.py",), "entra-nement"),
        (("x" * 300,), "x" * 200),
    ],
)
def test_a_job_is_named_after_its_program(program, name):
    assert name_of(program) == name
    assert replace(PLAIN, name=name).name == name


@pytest.mark.parametrize(("where", "value"), [("chdir", Path("/data/a\\b")), ("logs", "a\\")])
def test_folders_with_a_backslash_which_sbatch_takes_away_are_refused(where, value):
    with pytest.raises(ConfigError, match="must have no backslash"):
        replace(PLAIN, **{where: value})
