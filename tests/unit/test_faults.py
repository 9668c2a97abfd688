import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from jobs import HANG_SECONDS

from daso import trace
from daso.errors import ConfigError
from daso.testing.faults import Fault, parse, plant
from daso.train.deltas.shard import DeltaShard, MergeOptions


def test_faults_are_read_from_text():
    assert parse("kill rank 1 at merge 3; slow rank 0 at every step for 0.1 s;") == [
        Fault("kill", 1, "merge", 3),
        Fault("slow", 0, "step", None, 0.1),
    ]
    assert parse("stop rank 12 at wait for nodes for 5 s") == [
        Fault("stop", 12, "wait for nodes", 1, 5.0)
    ]
    assert parse("full rank 1 at step 4 after 4096 bytes") == [
        Fault("full", 1, "step", 4, None, 4096)
    ]
    assert parse("jump rank 1 at exchange by -3600 s") == [Fault("jump", 1, "exchange", 1, -3600.0)]
    assert parse("slow rank 1 at every step for 0.1 s during 60 s") == [
        Fault("slow", 1, "step", None, 0.1, window=60.0)
    ]
    assert parse("hang rank 0 at step 2 for 60 s") == [Fault("hang", 0, "step", 2, 60.0)]
    assert parse("flip rank 2 at merge 3") == [Fault("flip", 2, "merge", 3)]
    assert parse("") == []


@pytest.mark.parametrize(
    "text",
    [
        *("kill rank 1", "kill rank x at step", "burn rank 1 at step", "kill rank 1 at lunch"),
        *("kill rank 1 at every step 3", "kill rank 1 at step 0", "slow rank 1 at step 2"),
        *("full rank 1 at step 2", "jump rank 1 at step 2", "full rank 1 at step 2 for 3 s"),
        *(
            "kill rank 1 at step 2 for 1 s",
            "stop rank 1 at step 2 by 1 s",
            "raise rank 1 at step after 1 bytes",
            "hang rank 1 at step 2",
            "slow rank 1 at step 2 for 1 s during 5 s",
            "hang rank 1 at every step for 1 s during 5 s",
        ),
    ],
)
def test_other_text_is_refused_with_the_form(text):
    with pytest.raises(ConfigError, match=r"a fault must read|, but .* has none; add `"):
        parse(text)


def test_a_disk_is_full_from_some_byte_on_until_the_fault_is_taken_away(tmp_path):
    path = tmp_path / "file"
    remove = plant(parse("full rank 0 at send after 5000 bytes"), rank=0)
    path.write_bytes(bytes(9000))
    trace.record(trace.SEND, time.perf_counter())
    path.write_bytes(bytes(5000))
    with pytest.raises(OSError, match="File too large"):
        path.write_bytes(bytes(9000))
    remove()
    path.write_bytes(bytes(9000))


def fsync(path):
    file = os.open(path.with_name("other"), os.O_RDONLY)
    os.fsync(file)
    os.close(file)


WRITES = {
    "open": lambda path: path.write_bytes(b"x"),
    "append": lambda path: path.open("a").close(),
    "fsync": fsync,
    "rename": lambda path: path.with_name("other").replace(path),
    "remove": lambda path: path.with_name("other").unlink(),
    "mkdir": lambda path: path.with_name("folder").mkdir(),
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_wait_while_a_file_system_hangs_and_reads_do_not(tmp_path, write):
    path = tmp_path / "file"
    path.with_name("other").write_bytes(b"x")
    remove = plant(parse("hang rank 0 at send for 0.5 s"), rank=0)
    try:
        trace.record(trace.SEND, time.perf_counter())
        begun = time.perf_counter()
        path.with_name("other").read_bytes()
        assert time.perf_counter() - begun < 0.4
        WRITES[write](path)
        assert time.perf_counter() - begun > 0.4
        begun = time.perf_counter()
        path.write_bytes(b"y")
        assert time.perf_counter() - begun < 0.4, "it responds again"
    finally:
        remove()
    plant(parse("hang rank 0 at send for 600 s"), rank=0)
    trace.record(trace.SEND, time.perf_counter())
    remove = plant(parse("hang rank 0 at send for 0.01 s"), rank=0)  # shortens the first
    trace.record(trace.SEND, time.perf_counter())
    remove()
    path.write_bytes(b"z")


def test_a_rank_is_slow_during_a_window():
    remove = plant(parse("slow rank 0 at every send for 0.05 s during 0.2 s"), rank=0)
    begun = time.perf_counter()
    for _ in range(50):
        trace.record(trace.SEND, begun)
    seconds = time.perf_counter() - begun
    remove()
    assert 0.15 < seconds < 1.5, "50 delays take 2.5 s"


def test_a_bit_of_a_reference_flips():
    shard = DeltaShard(torch.zeros(5), MergeOptions())
    remove = plant(parse("flip rank 0 at send"), rank=0)
    trace.record(trace.SEND, time.perf_counter())
    remove()
    assert shard.reference.view(torch.int32).tolist() == [0, 0, 1, 0, 0]


def test_a_clock_jumps_and_what_measures_time_does_not():
    remove = plant(parse("jump rank 0 at send by -7200 s"), rank=0)
    begun, now = time.perf_counter(), time.time()
    trace.record(trace.SEND, begun)
    assert -7201 < time.time() - now < -7100
    assert -7201 < time.time_ns() / 1e9 - now < -7100
    assert 0 <= time.perf_counter() - begun < 100
    remove()
    assert time.time() >= now
    remove = plant(parse("jump rank 0 at every send by 10 s"), rank=0)
    for _ in range(2000):
        trace.record(trace.SEND, begun)
    assert time.time() - now > 20_000
    remove()
    assert time.time() - now < 10_000


def test_a_fault_strikes_its_rank_at_its_event_once():
    remove = plant(parse("raise rank 1 at merge 2"), rank=1)
    try:
        trace.record(trace.MERGE, time.perf_counter())
        trace.record(trace.SEND, time.perf_counter())
        with pytest.raises(RuntimeError, match="requested, on rank 1 at merge 2"):
            trace.record(trace.MERGE, time.perf_counter())
        trace.record(trace.MERGE, time.perf_counter())
    finally:
        remove()
    plant(parse("raise rank 1 at every merge"), rank=0)
    trace.record(trace.MERGE, time.perf_counter())
    plant(parse("slow rank 0 at every merge for 0.05 s"), rank=0)()
    begun = time.perf_counter()
    trace.record(trace.MERGE, begun)
    assert time.perf_counter() - begun < 0.05, "it was taken away"


PROGRAM = """
import sys, time
from daso import trace
print("words", sys.argv[1:], flush=True)
for _ in range(3):
    begun = time.perf_counter()
    trace.record(trace.STEP, begun)
    print(f"{time.perf_counter() - begun:.1f}", flush=True)
"""


@pytest.mark.parametrize(
    ("fault", "code", "ends"),
    [
        ("kill rank 0 at step 2", -signal.SIGKILL, 1),
        ("kill rank 1 at step 2", 0, 3),
        ("stop rank 0 at step 1 for 0.5 s", 0, 3),
        ("slow rank 0 at step 3 for 0.5 s", 0, 3),
    ],
)
def test_a_program_runs_unchanged_until_a_fault_strikes(tmp_path, fault, code, ends):
    (tmp_path / "program.py").write_text(PROGRAM)
    env = {name: value for name, value in os.environ.items() if not name.startswith("OMPI_")}
    done = subprocess.run(
        [sys.executable, "-m", "daso.testing.faults", fault, "program.py", "--x=1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
        env=env,
    )
    assert done.returncode == code, done.stderr
    first, *times = done.stdout.splitlines()
    assert first == "words ['--x=1']"
    assert len(times) == ends
    lasts = "for" in fault
    assert max(map(float, times)) >= 0.4 * lasts
    assert ("daso: fault" in done.stderr) == ("rank 0" in fault)
