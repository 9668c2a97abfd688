"""README and docs/: code runs as it stands, figures are those measured, commands are real."""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from jobs import HANG_SECONDS, started

ROOT = Path(__file__).parents[2]
PATHS = {
    "figures": ROOT / "scripts" / "figures" / "README.md",
    **{
        path.stem if "api" not in path.parts else f"api/{path.stem}": path
        for path in (
            ROOT / "README.md",
            ROOT / "CONTRIBUTING.md",
            *sorted((ROOT / "docs").glob("**/*.md")),
        )
    },
}
PAGES = {page: path.read_text() for page, path in PATHS.items()}


def blocks(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.DOTALL)


run_daso = partial(started, "daso")


@pytest.mark.later("starts ranks")
@pytest.mark.slow("starts ranks")
@pytest.mark.parametrize("ranks_per_node", ["2", "4"])
def test_the_program_runs_as_it_stands_on_four_ranks(tmp_path: Path, ranks_per_node: str) -> None:
    program = blocks("README")[0]
    path = tmp_path / "train.py"
    path.write_text(program)
    run = run_daso("run", "-n", "4", "--ranks-per-node", ranks_per_node, str(path))
    assert run.returncode == 0, run.stderr
    loss, exchanges = re.findall(r"last loss (\S+), (\d+) exchanges", run.stdout)[0]
    assert float(loss) < 0.5
    assert (int(exchanges) > 5) == (ranks_per_node == "2")


TRAINING = """
import time

import torch

import daso

model = torch.nn.Linear(300, 300)
inner = torch.optim.SGD(model.parameters(), lr=0.01)
wrapped = []


def train_one_step():
    # `Auto` would use the link for less than 1 % of the steps' time: too little for an estimate.
    policy = daso.Fixed(2, 1)
    optimizer = wrapped[0] if wrapped else daso.DASO(inner, module=model, policy=policy)
    wrapped[:] = [optimizer]
    start = time.perf_counter()
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    return time.perf_counter() - start


"""


@pytest.mark.later("starts ranks")
@pytest.mark.slow("starts ranks")
def test_its_imitation_of_another_machine_runs_on_two_nodes(tmp_path: Path) -> None:
    path = tmp_path / "soon.py"
    path.write_text(TRAINING + blocks("predict")[0])
    run = run_daso("run", "-n", "2", "--ranks-per-node", "1", str(path))
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("emulated, not measured on the target") == 2
    assert "the link is held to 41.67 MB/s" in run.stdout


@pytest.mark.later("starts ranks")
@pytest.mark.slow("starts ranks")
def test_a_program_on_two_nodes_is_throttled_unchanged(tmp_path: Path) -> None:
    path, plan = tmp_path / "train.py", tmp_path / "plan.toml"
    path.write_text(f"{TRAINING}for _ in range(60):\n    train_one_step()\n")
    plan.write_text(
        "[current]\ncompute = 500\nlink_bytes_per_second = 125e6\n"
        "[target]\ncompute = '3x'\nlink_bytes_per_second = '1x'\n"
    )
    run = run_daso(
        *("predict", "--throttle", str(plan), "--", sys.executable, "-m", "daso", "run"),
        *("-n", "2", "--ranks-per-node", "1", str(path)),
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("emulated, not measured on the target") == 1
    assert "the link is held to 41.67 MB/s" in run.stdout
    assert "of 59 steps, of world rank 0" in run.stdout


@pytest.mark.later("starts ranks")
@pytest.mark.slow("starts ranks")
def test_its_server_trains_on_ranks(tmp_path: Path) -> None:
    path = tmp_path / "serve.py"
    path.write_text(blocks("parameter-server")[0])
    run = run_daso("run", "-n", "2", str(path))
    assert run.returncode == 0, run.stderr
    for rank in range(2):
        losses = re.findall(rf"rank {rank}, epoch \d: loss (\S+), \S+ s", run.stdout)
        assert len(losses) == 3
        assert float(losses[-1]) < 0.8 * float(losses[0])


@pytest.mark.later("starts ranks")
@pytest.mark.slow("starts ranks")
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_its_flow_learns(tmp_path: Path, ranks: str) -> None:
    text = blocks("dynamic-models")[0]
    assert len(text.splitlines()) < 40
    path = tmp_path / "flow.py"
    path.write_text(text)
    run = run_daso("run", "-n", ranks, str(path))
    assert run.returncode == 0, run.stderr
    losses = [float(x) for x in re.findall(r"loss (\S+),", run.stdout)]
    assert len(losses) == 3 * int(ranks)
    assert losses[-1] < losses[0]


@pytest.mark.later("starts ranks")
@pytest.mark.slow("starts ranks")
def test_its_flows_on_two_nodes_end_with_the_same(tmp_path: Path) -> None:
    head, _ = blocks("dynamic-models")[0].split("updates = daso.flow.Updates")
    path = tmp_path / "flows.py"
    path.write_text(
        "import zlib\n"
        + head
        + blocks("dynamic-models")[1]
        + """
topology = daso.init()
with runtime:
    before = runtime.train_epoch(make_lists(300, seed=topology.node)).loss
    after = runtime.train_epoch(make_lists(300, seed=topology.node)).loss
params = [p for node in graph.nodes if node.kind == "layer" for p in node.call.parameters()]
bits = [zlib.crc32(p.detach().numpy().tobytes()) for p in params]
print(f"found {after < before} {bits}\\n", end="", flush=True)
"""
    )
    run = run_daso("run", "-n", "4", "--ranks-per-node", "2", str(path))
    assert run.returncode == 0, run.stderr
    found = re.findall(r"found True (\[.*?\])", run.stdout)
    assert len(found) == 4
    assert len(set(found)) == 1


@pytest.mark.later("starts ranks")
@pytest.mark.slow("starts ranks")
def test_its_plan_of_memory_holds(tmp_path: Path) -> None:
    path = tmp_path / "fit.py"
    path.write_text(blocks("memory")[0])
    run = run_daso("run", "-n", "2", str(path))
    assert run.returncode == 0, run.stderr
    told = re.findall(r"(\d+) MiB plainly, (\d+) as planned", run.stdout)
    assert len(told) == 2
    assert all(int(planned) <= 48 < int(plainly) for plainly, planned in told)


def test_the_program_runs_alone(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(blocks("README")[0])
    run = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "0 exchanges" in run.stdout


def test_files_and_folders_it_names_exist() -> None:
    text = "\n".join(PAGES.values())
    named = set(re.findall(r"`((?:daso|notebooks|slurm|tests|scripts)/[\w/.]+)`", text))
    named |= set(re.findall(r"^\./(scripts/\w+)", text, re.MULTILINE))
    assert len(named) > 8
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_links_lead_to_files() -> None:
    for page, text in PAGES.items():
        links = re.findall(r"\]\((?!http)([^)#]+)", text)
        assert [link for link in links if not (PATHS[page].parent / link).exists()] == [], page
    listed = set(re.findall(r"^([\w/-]+)$", PAGES["index"], re.MULTILINE))
    docs = ROOT / "docs"
    pages = {str(path.relative_to(docs).with_suffix("")) for path in docs.rglob("*.md")}
    assert listed == pages - {"index"}, "each page is in the index"


def test_the_readme_is_one_page() -> None:
    assert len(PAGES["README"].splitlines()) <= 150


def test_commands_it_shows_are_known() -> None:
    shown = {
        line.split()[1]
        for page in PAGES
        for text in blocks(page, "sh")
        for line in text.splitlines()
        if line.startswith("daso ")
    }
    assert shown == {
        "bench",
        "run",
        "train",
        "submit",
        "status",
        "logs",
        "doctor",
        "memory",
        "predict",
        "trace",
    }


def test_quoted_exchanges_over_their_limit_were_measured() -> None:
    import json

    found = json.loads((ROOT / "scripts/figures/exchange.json").read_text())["figures"]
    for wire in ("fp32", "bf16", "int4"):
        values = [f"{found[f'exchange_{wire}_over_limit_{n}']['value']:.2f}" for n in (2, 3, 4)]
        assert f"| {wire} | {' | '.join(values)} |" in PAGES["exchanges"]


def test_gaps_that_pages_of_explanation_quote_are_those_that_were_measured() -> None:
    import json

    names = ("accuracy-text", "accuracy", "accuracy-short")
    files = [json.loads((ROOT / f"scripts/figures/{name}.json").read_text()) for name in names]
    rows = [row for found in files for row in found["rows"] if "gap_error" in row]
    measured = {f"{row['gap']:.2f} ± {row['gap_error']:.2f}" for row in rows}
    for page in ("step-restoration", "schedules", "glossary", "exactness"):
        quoted = set(re.findall(r"-?\d+\.\d\d ± \d+\.\d\d", PAGES[page]))
        assert quoted <= measured, page
        assert quoted or page != "step-restoration"


def test_its_tables_are_those_that_were_measured() -> None:
    from benchmarks import tables

    places = re.compile("<!-- table: (.+) -->")
    assert set(places.findall("\n".join(PAGES.values()))) == set(tables.TABLES)
    for page in tables.pages():
        text = page.read_text()
        assert tables.filled(text) == text, f"run scripts/bench tables: {page.name}"
        assert text.count("<!-- table: ") == text.count("<!-- end of table -->")


def test_a_table_is_written_anew_where_it_stands() -> None:
    from benchmarks import tables

    before = "a\n<!-- table: step-times-on-a-gpu -->\nold\n<!-- end of table -->\n| mine |\n"
    after = tables.filled(before)
    assert after.startswith("a\n<!-- table: step-times-on-a-gpu -->\n\n| ranks | model")
    assert after.endswith(" |\n\n<!-- end of table -->\n| mine |\n")
    assert "old" not in after


def test_its_picture_shows_what_was_measured() -> None:
    import json

    from benchmarks.overview import COLUMNS, draw_overview, front_ratios, gaps_of_default

    train, adamw, text, to_accuracy = (
        json.loads((ROOT / f"scripts/figures/{name}.json").read_text())
        for name in ("train", "train_adamw_start", "accuracy-text", "to_accuracy")
    )
    left, right = draw_overview(train, adamw, text, to_accuracy).axes
    drawn = [bar.get_height() for bars in left.containers for bar in bars]
    columns = zip(*front_ratios(train, adamw).values(), strict=True)
    assert drawn == [ratio for column in columns for ratio in column if ratio is not None]
    assert len(drawn) > 2 * 8 and len(left.get_xticks()) == len(COLUMNS)
    series = gaps_of_default(text, to_accuracy).values()
    for bars, points in zip(right.containers, series, strict=True):
        assert list(bars.lines[0].get_ydata()) == [gap for gap, _ in points.values()]
        assert min(gap - error for gap, error in points.values()) > right.get_ylim()[0]
    by_link = dict(zip(("1gbit", "100mbit"), list(series)[-1].values(), strict=True))
    for link, (gap, _) in by_link.items():
        told = to_accuracy["figures"][f"accuracy_gap_{link}"]["value"]
        assert gap == pytest.approx(-told, abs=1e-9)


def test_quoted_exchanges_among_many_nodes_were_measured() -> None:
    import json

    from daso.plan.allreduce_plan import direct_plan
    from daso.plan.cost_model import LinkCosts, allreduce_cost, choose_plan

    nbytes, text = 50e6, " ".join(PAGES["options"].split())
    plans = [(choose_plan("auto", nodes, nbytes), nodes) for nodes in (64, 256, 1024)]
    counts = [allreduce_cost(plan, nbytes, LinkCosts()).messages for plan, _ in plans]
    assert "| groups | {} | {} | {} |".format(*counts) in text
    direct = [allreduce_cost(direct_plan(plan.peers), nbytes, LinkCosts()) for plan, _ in plans]
    said = "| direct, with smaller messages | {:,} | {:,} | {:,} |"
    assert said.format(*(cost.messages for cost in direct)) in text
    runs = json.loads((ROOT / "scripts/figures/exchange_nodes.json").read_text())["runs"]
    (racks,) = [run for run in runs if run["plan"]["racks"] == 2]
    (slow,) = [run for run in runs if run["plan"]["slow_link"] == "100mbit"]
    for unequal in (racks, slow):
        ms = {row["name"]: f"{row['ms']:.0f}" for row in unequal["rows"]}
        said = (ms["fp32, planned"], ms["fp32"], ms["fp32, MPI Allreduce"], ms["fp32, gloo"])
        assert "| {} | {} | {} | {} |".format(*said) in text


def test_keywords_it_lists_are_those_of_the_optimizer() -> None:
    import inspect

    import daso

    listed = re.findall(r"^\| `(\w+)` \|", PAGES["options"], re.MULTILINE)
    signature = inspect.signature(daso.DASO.__init__).parameters
    assert listed == [name for name in signature if name not in ("self", "inner")]
    listed = re.findall(r"^\| `(\w+)` \|", PAGES["parameter-server"], re.MULTILINE)
    signature = inspect.signature(daso.ParameterServer.__init__).parameters
    assert set(listed) < set(signature)


def test_seconds_of_a_server_with_momentum_are_those_that_were_measured() -> None:
    import json

    figures = json.loads((ROOT / "scripts/figures/server_momentum.json").read_text())["figures"]
    ratio = figures["time_to_loss_ratio_slow3_momentum"]["value"]
    text = " ".join(PAGES["parameter-server"].split())
    assert f"`staleness=None` took {ratio:.2f} of DDP's seconds" in text
    found = json.loads((ROOT / "scripts/figures/server.json").read_text())
    gaps = [found["figures"][f"accuracy_gap{slow}"]["value"] for slow in ("", "_slow3")]
    said = "| all ranks alike | {:.2f} | | | last rank 3 times as slow | {:.2f} |"
    assert said.format(*gaps) in text


def test_errors_of_predictions_are_those_that_were_measured() -> None:
    import json

    figures = json.loads((ROOT / "scripts/figures/predict.json").read_text())["figures"]
    percent = {name: 100 * one["value"] for name, one in figures.items()}
    text = " ".join(PAGES["predict"].split())
    said = "| `daso predict` | {prediction_error_median:.1f} | {prediction_error_worst:.1f} |"
    assert said.format(**percent) in text
    said = "computing and transfer | {added_error_median:.1f} | {added_error_worst:.1f} |"
    assert said.format(**percent) in text
    assert "used for the others | {unchanged_error_median:.0f} |".format(**percent) in text


def test_faults_came_to_what_it_says() -> None:
    import json

    rows = json.loads((ROOT / "scripts/figures/faults.json").read_text())["rows"]
    struck = [row for row in rows if row["struck"]]
    assert not [row for row in rows if row["problem"]]
    text = " ".join(PAGES["elastic"].split())
    assert f"{len(rows)} jobs of three nodes" in text
    assert f"{len(struck)} faults occurred" in text
    longest = [
        max(row["longest_step_seconds"] for row in struck if kind in (row["faults"] or "kill"))
        for kind in ("kill", "raise", "stop")
    ]
    said = (
        "| a rank is killed | {:.2f} | | a rank raises | {:.2f} | | a rank stops for 2 s | {:.2f} |"
    )
    assert said.format(*longest) in text
    alone = [row for row in struck if max(row["node_sizes"]) == 1]
    killed = max(
        row["longest_step_seconds"] for row in alone if "kill" in (row["faults"] or "kill")
    )
    assert f"| a rank is killed, nodes of one rank | {killed:.2f} |" in text


def test_an_elastic_step_takes_what_was_measured() -> None:
    import json

    figures = json.loads((ROOT / "scripts/figures/recovery.json").read_text())["figures"]
    took = figures["elastic_overhead_ratio"]["value"]
    assert f"`elastic=True` took {took:.3f} of one without" in PAGES["elastic"]


@pytest.mark.later("starts ranks")
@pytest.mark.slow("starts ranks")
def test_training_with_the_settings_it_shows(tmp_path: Path) -> None:
    (line,) = [
        line
        for text in blocks("commands", "sh")
        for line in text.splitlines()
        if "--data.name=text" in line
    ]
    words = [*line.split()[1:], f"--runs={tmp_path}", "--epochs=1"]
    run = run_daso(*words)
    assert run.returncode == 0, run.stderr
    assert "ranks identical" in run.stdout


def test_flows_learn_as_fast_as_it_says() -> None:
    import json

    figures = json.loads((ROOT / "scripts/figures/flow.json").read_text())["figures"]
    found = {name: figure["value"] for name, figure in figures.items()}
    section = " ".join(PAGES["dynamic-models"].split())
    assert f"{found['epochs_ratio']:.2f} times the epochs" in section
    assert f"{found['seconds_ratio']:.2f} times the seconds" in section
    assert f"to {100 * found['list_reduction_accuracy']:.1f} %" in section
