import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from jobs import HANG_SECONDS
from minicluster import start
from minicluster.command import main
from minicluster.state import read_record, remove, write_record
from minicluster.text import CONTROL, Minicluster

from daso.errors import ConfigError
from daso.predict.links import parse_rate

SCRIPT = Path(__file__).parents[3] / "scripts" / "minicluster"
TOKEN = "0123456789abcdef"


def cluster(**changes):
    return Minicluster(**{"folder": "/run/it", "token": TOKEN, "hosts": 3, "subnet": 9, **changes})


@pytest.fixture
def state():
    """A folder that may hold a cluster's state: not in /tmp."""
    folder = Path(tempfile.mkdtemp(prefix="daso-state-", dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder)


# --- rates ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "bits"),
    [
        ("1gbit", 10**9),
        ("2.5gbit", 2_500_000_000),
        ("100mbit", 10**8),
        ("1000kbit", 10**6),
        ("100gbit", 10**11),
        ("none", None),
    ],
)
def test_a_rate_is_bits_per_second(word, bits):
    assert parse_rate(word) == bits


@pytest.mark.parametrize(
    "word", ["", "fast", "1", "1 gbit", "1Gbit", "-1gbit", "1gbps", "999kbit", "101gbit", "0mbit"]
)
def test_a_bad_rate_is_one_line_with_rule_value_and_remedy(word):
    with pytest.raises(ConfigError, match=r"1mbit to 100gbit, not .*; write it as") as error:
        parse_rate(word)
    assert repr(word) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("rate", "burst"), [("10mbit", 73_728), ("1gbit", 125_000), ("10gbit", 1_250_000)]
)
def test_a_burst_lasts_a_millisecond_and_holds_what_the_kernel_hands_over(rate, burst):
    words = cluster().shape("eth0", rate).split()
    assert int(words[words.index("burst") + 1]) == burst


def test_no_rate_is_no_queue():
    assert cluster().shape("eth0", "none") == "qdisc replace dev eth0 root noqueue"


def test_both_ends_of_every_link_are_held_to_the_rate():
    one = cluster(rate="1gbit")
    ports = one.port_shapes().splitlines()
    assert [line.split()[3] for line in ports] == ["mini0", "mini1", "mini2"]
    for name, port in zip(one.names, ports, strict=True):
        assert f"tc {port.replace(f'dev {name}', 'dev eth0')}" in one.host_script(name)


def test_a_host_may_have_a_rate_of_its_own_and_a_rack_a_thin_link():
    one = cluster(hosts=4, rate="1gbit", rates={"mini2": "100mbit"}, racks=2, uplink="200mbit")
    rates = {line.split()[3]: line.split()[7] for line in one.port_shapes().splitlines()}
    hosts = {name: "1000000000bit" for name in one.names}
    links = dict.fromkeys(("up0", "down0", "up1", "down1"), "200000000bit")
    assert rates == {**hosts, "mini2": "100000000bit", **links}
    assert [one.bridge(name) for name in one.names] == ["rack0", "rack0", "rack1", "rack1"]
    assert {cluster(hosts=4).bridge(name) for name in one.names} == {"bridge"}


# --- what it refuses ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hosts": 0}, "hosts must be from 1 to 60, not 0; "),
        ({"hosts": 61}, "hosts must be from 1 to 60, not 61; "),
        ({"cpus": 0}, "CPUs of a host must be from 1 to 1024, not 0; "),
        ({"racks": 4}, r"racks must be from 1 to that of hosts \(3\), not 4; "),
        ({"racks": 0}, r"racks must be from 1 to that of hosts \(3\), not 0; "),
        ({"uplink": "fast"}, "rate of a link must be none or from .*'fast'; "),
        ({"rates": {"mini9": "1gbit"}}, "host must be one of mini0, mini1, mini2, not 'mini9'"),
        ({"rates": {"mini1": "fast"}}, "rate of a link must be none or from .*'fast'; "),
        ({"rate": "fast"}, "rate of a link must be none or from .*'fast'; "),
        ({"folder": "run"}, "must be an absolute path .*; set DASO_MINICLUSTER"),
        ({"folder": "/run/" + 80 * "x"}, "at most 80 characters, not .*; set DASO_MINICLUSTER"),
        ({"folder": "/run/a b"}, "letters, digits and ._.- alone, not '/run/a b'.*; set"),
        ({"share": ("/tmp/a;b",)}, "folder to share must .* alone, not '/tmp/a;b'.*; move it"),
        ({"folder": "/tmp/it"}, "must not lie in /tmp, .* it is /tmp/it; set DASO_MINICLUSTER"),
        ({"folder": "/dev/shm"}, "must not lie in /dev/shm, .*; set DASO_MINICLUSTER"),
    ],
)
def test_a_value_out_of_range_is_one_line(changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        cluster(**changes)
    assert "\n" not in str(error.value)


# --- texts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", [1, 4, 60])
def test_every_host_has_a_name_and_an_address_of_its_own(hosts):
    one = cluster(hosts=hosts)
    addresses = {one.address(name) for name in (*one.names, CONTROL)} | {one.outside}
    assert len(addresses) == hosts + 2
    assert all(address.startswith("10.77.9.") for address in addresses)


def test_host_names_are_resolved_by_a_file_that_only_the_hosts_see():
    assert cluster().hosts_file().splitlines() == [
        "127.0.0.1 localhost",
        "10.77.9.1 mini0",
        "10.77.9.2 mini1",
        "10.77.9.3 mini2",
        "10.77.9.254 minictl",
    ]


def test_slurm_conf_names_hosts_addresses_and_files_of_the_state_folder():
    text = cluster(cpus=6, memory=2000).slurm_conf()
    assert "SlurmctldHost=minictl(10.77.9.254)\n" in text
    assert "NodeName=mini2 NodeAddr=10.77.9.3 CPUs=6 RealMemory=2000 " in text
    assert re.search(r"^PartitionName=mini Nodes=ALL MaxNodes=3 Default=YES ", text, re.MULTILINE)
    paths = set(re.findall(r"=(/[^\s,]+)", text)) | set(re.findall(r"socket=([^\s,]+)", text))
    assert {path for path in paths if not path.startswith("/run/it/")} == {"/bin/true"}


def test_a_socket_path_has_room_in_the_longest_folder():
    one = cluster(folder="/run/".ljust(80, "x"))
    longest = max(len(path) for path in re.findall(r"/run/[^\s,]+", "".join(one.files().values())))
    assert longest < 108


def test_nothing_starts_before_it_is_told_to():
    one = cluster()
    for script in (one.control_script(), *map(one.host_script, one.names)):
        told = script.index("\nread -r go\n")
        assert min(script.find(word) for word in ("slurm", "munged") if word in script) > told


def test_a_folder_to_share_is_mounted_where_the_host_has_a_tmp_of_its_own():
    script = cluster(share=("/tmp/a/b", "/home/c")).host_script("mini1")
    assert "mkdir -p /run/it/mini1/tmp/a/b\n" in script
    assert "mount -n --bind /tmp/a/b /run/it/mini1/tmp/a/b\n" in script
    assert "/home/c" not in script


def test_its_processes_and_its_link_carry_the_token():
    one = cluster()
    assert one.holder("mini0")[-1] == TOKEN
    assert one.link == "mini-01234567"
    assert len(one.link) <= 15
    assert f"link add {one.link} type veth peer name outside netns 7" in one.outer_link(7)


def test_every_host_is_a_port_of_the_bridge():
    lines = cluster().inner_links({"mini0": 11, "mini1": 12, "mini2": 13}).splitlines()
    for name, pid in (("mini0", 11), ("mini1", 12), ("mini2", 13)):
        assert f"link add {name} type veth peer name eth0 netns {pid}" in lines
        assert f"link set {name} master bridge up" in lines


# --- the record and the folder --------------------------------------------------------------------


def test_a_record_is_read_as_it_was_written(state):
    one = cluster(folder=str(state), share=("/tmp/a",))
    write_record(state, one)
    assert read_record(state) == one
    assert (state / "record.json").stat().st_mode & 0o022 == 0


def test_a_record_of_another_folder_is_refused_and_nothing_is_removed(state, monkeypatch, capsys):
    """Root would remove the folder that it names."""
    victim, folder = state / "victim", state / "here"
    for one in (victim, folder):
        one.mkdir()
    (victim / "thesis.tex").touch()
    write_record(folder, cluster(folder=str(victim)))
    for command in ("down", "status", "env"):
        assert main([command], folder=str(folder)) == 2
        assert f"in its own folder, but names {victim}" in capsys.readouterr().err
    assert (victim / "thesis.tex").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="others' files are root's to make")
@pytest.mark.parametrize("what", ["folder", "record.json"])
@pytest.mark.parametrize("how", ["owner", "mode", "link"])
def test_what_others_may_have_written_is_no_record_for_root(state, what, how):
    folder = state / "here"
    folder.mkdir()
    write_record(folder, cluster(folder=str(folder)))
    path = folder if what == "folder" else folder / what
    if how == "owner":
        os.chown(path, 65534, 65534)
    elif how == "mode":
        path.chmod(0o777)
    else:
        path.rename(state / "elsewhere")
        path.symlink_to(state / "elsewhere")
    with pytest.raises(ConfigError, match="must belong to root, and nobody else may write to it"):
        read_record(folder)


@pytest.mark.parametrize("made", [[], ["record.json.new"]])
def test_an_empty_folder_holds_no_cluster(tmp_path, made):
    for name in made:
        (tmp_path / name).touch()
    assert read_record(tmp_path) is None
    assert read_record(tmp_path / "none") is None


def test_a_folder_of_somebody_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"empty or minicluster's own, but .*; set DASO_MINI"):
        read_record(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", '{"hosts": 2, "colour": 3}', "[]"])
def test_a_damaged_record_is_refused(tmp_path, text):
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(ConfigError, match="must be minicluster's own, but"):
        read_record(tmp_path)


# --- the command ----------------------------------------------------------------------------------


def run(*words, folder="/run/no-such-minicluster"):
    return main(words, folder=folder)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "arguments are required: COMMAND; `minicluster --help` shows how"),
        (["fly"], "invalid choice: 'fly'"),
        (["up"], "arguments are required: N; `minicluster up --help` shows how"),
        (["up", "many"], "invalid int value: 'many'"),
    ],
)
def test_words_it_does_not_know_are_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as end:
        run(*words)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["up", "0"], "from 1 to 60, not 0"),
        (["up", "2", "--rate", "fast"], "not 'fast'"),
        (["up", "2", "--cpus", "0"], "not 0"),
        (["rate", "fast"], "not 'fast'"),
        (["rate", "1gbit"], "must be up in /run/no-such-minicluster, but none is; run `up 4`"),
        (["cut", "mini0"], "none is; run `up 4` first"),
        (["mend", "mini0"], "none is; run `up 4` first"),
        (["exec", "mini0", "true"], "none is; run `up 4` first"),
        (["env"], "none is; run `up 4` first"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(words, message, capsys):
    assert run(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("minicluster: ")
    assert message in line


@pytest.mark.parametrize("command", ["down", "status"])
def test_where_nothing_is_up_it_says_so(command, capsys):
    assert run(command) == 0
    assert "no cluster is up in /run/no-such-minicluster" in capsys.readouterr().out


def test_a_removal_that_is_cut_off_leaves_the_record_and_can_be_repeated(state, monkeypatch):
    """Without the record, `down` would take what is left for somebody else's, and refuse."""
    folder = state / "here"
    one = cluster(folder=str(folder))
    folder.mkdir()
    write_record(folder, one)
    for name in (*one.names, CONTROL):
        (folder / name / "spool").mkdir(parents=True)
    (folder / "slurm.conf").write_text("")
    removed = []

    def cut_off(path):
        if len(removed) == 2 or path == folder:
            raise KeyboardInterrupt
        removed.append(path)
        shutil_rmtree(path)

    shutil_rmtree = shutil.rmtree
    for _ in range(3):
        removed.clear()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(shutil, "rmtree", cut_off)
            remove(folder)
        assert read_record(folder) == one
    remove(folder)
    assert not folder.exists()


def test_somebody_who_is_not_root_is_told(monkeypatch, capsys):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert run("up", "2") == 1
    assert capsys.readouterr().err == (
        "minicluster: minicluster must run as root, which may make namespaces; use sudo\n"
    )


@pytest.mark.parametrize("words", [["down"], ["status"], ["rate", "1gbit"], ["cut", "mini0"]])
def test_somebody_who_is_not_root_is_told_of_a_cluster_too(words, state, monkeypatch, capsys):
    write_record(state, cluster(folder=str(state)))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert main(words, folder=str(state)) == 1
    assert "must run as root" in capsys.readouterr().err
    assert (state / "record.json").exists()


def test_missing_programs_are_named_with_their_packages(monkeypatch, capsys):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(start, "PATH", "/nowhere")
    assert run("up", "2") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "slurmctld, slurmd, sinfo, munged, ip, tc, " in line
    assert "on Debian: apt install slurm-wlm munge iproute2 " in line


def test_the_script_needs_no_virtual_environment():
    # -I -S: neither site-packages nor PYTHONPATH.
    run = subprocess.run(
        [sys.executable, "-I", "-S", SCRIPT, "--help"],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "up 4 --rate 1gbit" in run.stdout


def test_help_and_commands_agree(capsys):
    with pytest.raises(SystemExit):
        run("--help")
    text = capsys.readouterr().out
    for command in ("up", "rate", "status", "cut", "mend", "exec", "env", "down"):
        assert re.search(rf"^    {command}  ", text, re.MULTILINE)
