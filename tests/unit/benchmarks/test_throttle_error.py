"""`scripts/bench throttle`: errors of estimates, and the figures that the docs quote."""

import json
import re
from pathlib import Path

import pytest
from benchmarks import link_ratio, throttle_error, throttle_links

ROOT = Path(__file__).parents[3]
EXACT = pytest.approx


def row(estimated, measured, factor=2.0):
    named = {"policy": "synchronous", "mbytes_per_second": 100.0, "factor": factor}
    return named | {"now_ms": 10.0, "estimated_ms": estimated, "measured_ms": measured}


def test_errors_are_parts_of_what_was_measured():
    rows = [row(11.0, 10.0), row(16.0, 20.0), row(30.0, 30.0)]
    plan = {"factors": [2.0], "rates": [1e8], "steps": 60}
    found = throttle_error.figures({"rows": rows, "plan": plan})
    values = {name: one["value"] for name, one in found.items()}
    assert values == {
        "throttle_prediction_error_median": EXACT(0.1),
        "throttle_prediction_error_worst": EXACT(0.2),
    }
    assert throttle_error.errors(rows[:1], "unchanged") == EXACT([0.0])
    assert throttle_error.errors(rows[:1], "all times the factor") == EXACT([1.0])
    lines = throttle_error.table({"rows": rows}).splitlines()
    assert len(lines) == 4
    assert "-20.0%" in lines[2]


def test_a_simulated_device_is_said_to_be_one():
    told = {"copy": 0.3, "times": 2.0, "now_ms": 9.0, "estimated_ms": 4.4, "measured_ms": 4.0}
    figure = link_ratio.figures({"rows": [told]})["link_ratio_error_median"]
    assert figure["value"] == EXACT(0.1)
    assert "SIMULATED" in figure["conditions"]
    assert "10.0%" in link_ratio.table({"rows": [told]})


def test_links_that_the_system_shapes_have_errors_of_their_own():
    told = {"now_ms": 10.0, "estimated_ms": 45.0, "measured_ms": 50.0}
    rows = [{"policy": "synchronous", "link": link, **told} for link in ("100mbit", "250mbit")]
    found = {"rows": rows, "link_bytes_per_second": 1.1e8, "steps": 9}
    assert throttle_links.table(found).splitlines()[2].endswith("-10.0%")
    figure = throttle_links.figures(found)["throttle_link_error_worst"]
    assert figure["value"] == EXACT(0.1)
    assert "links of 100mbit, 250mbit that tc shapes" in figure["conditions"]


def test_errors_that_the_guide_quotes_are_those_that_were_measured():
    told = json.loads((ROOT / "scripts/figures/throttle.json").read_text())
    page = " ".join((ROOT / "docs/how-to/predict.md").read_text().split())
    numbers = r"\| (\S+) \| (\S+) \|"
    found = re.search(rf"cores \((\S+), `scripts/figures/throttle.json`\) {numbers}", page)
    link = re.search(r"simulated devices that are faster \| (\S+) \|", page)
    names = "throttle_prediction_error_median", "throttle_prediction_error_worst"
    values = [f"{100 * told['figures'][name]['value']:.1f}" for name in names]
    assert found.groups() == (told["date"], *values)
    shaped = re.search(rf"on a link of 1 Gbit/s {numbers}", page)
    names = "throttle_link_error_median", "throttle_link_error_worst"
    assert shaped.groups() == tuple(f"{100 * told['figures'][name]['value']:.1f}" for name in names)
    assert link[1] == f"{100 * told['figures']['link_ratio_error_median']['value']:.1f}"
