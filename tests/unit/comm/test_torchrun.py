"""How ranks that torchrun started meet, and what MPICH is told of the others."""

import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from datetime import timedelta

import pytest
from jobs import slowness
from torch.distributed import TCPStore

from daso.comm.torchrun import pmi
from daso.comm.torchrun.pmi import RankLostError, Ranks, mapping_of
from daso.environment import (
    TorchrunAgents,
    read_launch,
    read_torchrun_agents,
    set_pmi_environment,
    unset_pmi_connection,
)
from daso.errors import TopologyError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "6",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


# --- who started this rank -----------------------------------------------------------------------


def test_what_torchrun_says_is_read():
    assert read_torchrun_agents(TORCHRUN) == TorchrunAgents(3, 6, "node7", 29400, "job")


@pytest.mark.parametrize(
    "change",
    [
        {"TORCHELASTIC_USE_AGENT_STORE": "False"},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"RANK": ""},
        {"MASTER_PORT": "x"},
        {"OMPI_COMM_WORLD_SIZE": "2"},
        {"PMI_PORT": "host:1"},
        {"DASO_PMI_PID": "1"},  # by the rank that started this process
    ],
)
def test_ranks_of_others_and_of_no_store_are_not_torchruns(change):
    assert read_torchrun_agents({**TORCHRUN, **change}) is None


def test_who_has_a_connection_to_its_launcher_is_not_torchruns(tmp_path):
    with socket.socket() as connection, (tmp_path / "any").open("w") as file:
        assert read_torchrun_agents({**TORCHRUN, "PMI_FD": str(connection.fileno())}) is None
        assert read_torchrun_agents({**TORCHRUN, "PMI_FD": str(file.fileno())}) is not None
    assert read_torchrun_agents({**TORCHRUN, "DASO_PMI_PID": str(os.getpid())}) is not None


def test_what_srun_said_to_torchrun_is_not_for_its_ranks():
    outer = {"PMI_FD": "9999", "PMI_SIZE": "2", "PMI_RANK": "1"}
    outer |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    launch = read_launch({**TORCHRUN, **outer})
    assert (launch.launcher, launch.size, launch.rank) == ("torchrun", 6, 3)


@pytest.mark.parametrize(("ranks", "yields"), [(2, None), (3, "1")])
def test_mpi_is_told_who_it_is_and_whether_ranks_share_a_core(monkeypatch, ranks, yields):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "environ", {"PMIX_RANK": "7", "LOCAL_WORLD_SIZE": str(ranks)})
    set_pmi_environment(1, 6, 5)
    said = {"PMI_FD": "5", "PMI_RANK": "1", "PMI_SIZE": "6", "DASO_PMI_PID": str(os.getpid())}
    said |= {"MPIR_CVAR_ENABLE_HEAVY_YIELD": yields} if yields else {}
    assert os.environ == {"LOCAL_WORLD_SIZE": str(ranks), **said}
    unset_pmi_connection()
    assert "PMI_FD" not in os.environ


# --- what ranks are told -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "told"),
    [
        (["a"], "(vector,(0,1,1))"),
        (["a", "a", "b", "b"], "(vector,(0,2,2))"),
        (["a", "a", "b"], "(vector,(0,1,2),(1,1,1))"),
        (["a", "b", "a"], "(vector,(0,2,1),(0,1,1))"),
        ([f"{at // 8}" for at in range(8192)], "(vector,(0,1024,8))"),
    ],
)
def test_ranks_of_a_host_are_told_of(hosts, told):
    assert mapping_of(hosts) == told
    ranks = Ranks(hosts)
    answer = ranks.answer(0, "cmd=get kvsname=daso key=PMI_process_mapping")
    assert answer == {0: f"cmd=get_result rc=0 value={told}"}


def test_what_is_longer_than_mpich_reads_is_left_to_it():
    assert mapping_of([f"{at * at % 97}" for at in range(600)]) is None
    asked = Ranks(["a", "b", "b"] * 300).answer(0, "cmd=get kvsname=daso key=PMI_process_mapping")
    assert "rc=-1" in asked[0]


def test_no_two_jobs_have_the_same_name():
    """MPICH names shared memory by it: ranks of one job would take that of another."""
    asked = [Ranks(["a"]).answer(0, "cmd=get_my_kvsname")[0] for _ in range(2)]
    assert asked[0] != asked[1]


def test_what_one_puts_another_gets_and_all_leave_a_barrier_together():
    ranks = Ranks(["a", "b", "b"])
    assert ranks.answer(1, "cmd=init pmi_version=1 pmi_subversion=1")[1].endswith("rc=0")
    assert ranks.answer(1, "cmd=get_universe_size") == {1: "cmd=universe_size size=3 rc=0"}
    asked = "cmd=get kvsname=daso key=card"
    assert "rc=-1" in ranks.answer(2, asked)[2]
    assert ranks.answer(0, "cmd=put kvsname=daso key=card value=a=b c") == {
        0: "cmd=put_result msg=success rc=0"
    }
    for _ in range(2):
        assert ranks.answer(0, "cmd=barrier_in") == ranks.answer(2, "cmd=barrier_in") == {}
        out = ranks.answer(1, "cmd=barrier_in")
        assert out == dict.fromkeys(range(3), "cmd=barrier_out rc=0")
    assert ranks.answer(2, asked) == {2: "cmd=get_result rc=0 value=a=b c"}
    assert "rc=-1" in ranks.answer(0, "cmd=spawn")[0]
    with pytest.raises(RankLostError):
        ranks.answer(0, "cmd=abort exitcode=1")


def test_a_rank_that_goes_before_its_end_ends_all():
    ranks = Ranks(["a", "b"])
    assert ranks.answer(0, "cmd=finalize") == {0: "cmd=finalize_ack rc=0"}
    ranks.disconnect(0)
    with pytest.raises(RankLostError):
        ranks.disconnect(1)


# --- how they meet -------------------------------------------------------------------------------


@pytest.fixture
def agents():
    """Return what a rank is told by agents whose store is there."""
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))
    yield lambda rank, size: TorchrunAgents(rank, size, "127.0.0.1", store.port, "job")
    for server in pmi._servers:
        server.stdin.close()
        server.wait(timeout=20)
    pmi._servers.clear()


def meet(agents, came, size, seconds):
    """Let some ranks of a world meet; return what each got."""
    found = {}

    def enter(rank):
        try:
            found[rank] = pmi.rendezvous(agents(rank, size), seconds)
        except TopologyError as error:
            found[rank] = error

    threads = [threading.Thread(target=enter, args=[rank]) for rank in came]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def ask(connection, line):
    connection.sendall(f"{line}\n".encode())
    return connection.makefile("r").readline().strip()


def test_all_ranks_get_a_connection_to_one_server_that_ends_with_the_last(agents):
    found = meet(agents, range(3), 3, 20.0)
    assert ask(found[1], "cmd=put kvsname=daso key=a value=1") == "cmd=put_result msg=success rc=0"
    assert ask(found[2], "cmd=get kvsname=daso key=a") == "cmd=get_result rc=0 value=1"
    (server,) = pmi._servers
    for rank, connection in found.items():
        assert server.poll() is None, rank
        assert ask(connection, "cmd=finalize") == "cmd=finalize_ack rc=0"
        connection.close()
    assert server.wait(timeout=20) == 0


def test_where_one_is_lost_the_others_wait_no_longer(agents):
    found = meet(agents, range(3), 3, 20.0)
    found[0].sendall(b"cmd=barrier_in\n")
    found[1].close()
    for rank in (0, 2):
        assert found[rank].recv(9) == b""
        found[rank].close()


def test_who_finds_the_server_of_an_earlier_start_looks_again(agents):
    """torchrun starts ranks anew, and its store keeps what the earlier ones said."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    told = agents(0, 2)
    store = TCPStore(told.host, told.port, is_master=False, timeout=timedelta(seconds=20))
    store.set("daso/job", f"{port} word")
    late = threading.Timer(0.5, meet_alone, [found := {}, agents(0, 2)])
    late.start()
    meet_alone(found, agents(1, 2))
    late.join()
    for connection in found.values():
        assert ask(connection, "cmd=finalize") == "cmd=finalize_ack rc=0"
        connection.close()
    assert len(found) == 2


def meet_alone(found, one):
    found[one.rank] = pmi.rendezvous(one, 20.0)


@pytest.mark.later("waits for ranks that do not come")
def test_ranks_that_do_not_come_are_named_on_those_that_did(agents):
    found = meet(agents, [0, 2], 4, 5.0 * slowness())
    for error in found.values():
        assert isinstance(error, TopologyError)
        assert "of 4 world rank 1, 3 did not" in str(error)
        assert "\n" not in str(error)


def test_without_the_first_rank_the_others_say_that_they_met_none(agents):
    found = meet(agents, [1], 2, 0.5)
    assert "world rank 1 of 2 met no other" in str(found[1])
    assert "\n" not in str(found[1])


def test_who_does_not_know_the_word_is_no_rank():
    words = [sys.executable, "-m", "daso.comm.torchrun.pmi", "1", "20"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as server:
        port, token = server.stdout.readline().split()
        silent = socket.create_connection(("127.0.0.1", int(port)))
        for said in (b"guess 0 host\n", f"{token} 1 host\n".encode(), b"\xff 0 host\n", 999 * b"x"):
            with socket.create_connection(("127.0.0.1", int(port))) as stranger:
                stranger.sendall(said)
                with suppress(ConnectionResetError):  # what it said was not read to its end
                    assert stranger.recv(9) == b""
        with socket.create_connection(("127.0.0.1", int(port))) as rank:
            rank.sendall(f"{token} 0 host\n".encode())
            assert rank.makefile().readline() == "all ranks are here\n"
        assert silent.recv(9) == b""
        silent.close()
    assert server.returncode == 0


def test_the_server_ends_with_who_started_it():
    words = [sys.executable, "-m", "daso.comm.torchrun.pmi", "2", "99"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as server:
        server.stdout.readline()
        server.stdin.close()
        assert server.wait(timeout=20) != 0
