"""What fits and how many: capacity, inventories, workloads."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3hal.plan.hardware import known_hardware
from k3hal.plan.nearest import plan_or_refuse
from k3hal.plan.recipe_toml import builtin_recipe
from k3hal.plan.request import PlanRequest
from k3hal.plan.speed import speeds
from k3hal.plan.trace import Arrival, percentile
from k3hal.plan.workload import simulate

from .conftest import Answer

Plan = Callable[[str], Answer]


def _trace(path: Path, requests: Sequence[tuple[float, int, int]]) -> str:
    names = ("timestamp", "input_length", "output_length")
    path.write_text("\n".join(json.dumps(dict(zip(names, each, strict=True))) for each in requests))
    return f"trace:{path}"


def test_capacity_agrees_with_what_is_refused(plan: Plan) -> None:
    document = plan("--hardware b300 --capacity --json").json["capacity"]
    rows = document["rows"]
    assert [row["context"] for row in rows] == [4096 << step for step in range(9)]
    most = [row["max_concurrency"] for row in rows]
    assert most == sorted(most, reverse=True)
    for row in rows:
        for n, used in zip(document["concurrencies"], row["used_gb"], strict=True):
            assert (used is not None) == (n <= row["max_concurrency"])
            assert used is None or used <= document["device_gb"]
    for row in (rows[0], rows[5], rows[-1]):
        args = f"--hardware b300 --context {row['context']} --concurrency"
        assert plan(f"{args} {row['max_concurrency']}").code == 0
        assert plan(f"{args} {row['max_concurrency'] + 1}").code == 2


def test_the_picture_is_svg_and_says_what_the_table_says(plan: Plan, tmp_path: Path) -> None:
    answer = plan(f"--hardware b300 --capacity --picture {tmp_path}/c.svg --json")
    root = ElementTree.fromstring((tmp_path / "c.svg").read_text("utf-8"))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    rows = answer.json["capacity"]["rows"]
    assert texts.count(None) == sum(used is None for row in rows for used in row["used_gb"])
    assert all(str(row["context"]) in texts for row in rows)
    assert plan(f"--hardware b300 --capacity --picture {tmp_path}/none/c.svg").code == 4


def test_capacity_as_text_marks_what_does_not_fit(plan: Plan) -> None:
    lines = plan("--hardware b300 --capacity").out.splitlines()
    assert [line.split()[-1] for line in lines if line.lstrip().startswith("1048576")] == ["-", "·"]


def test_an_inventory_of_several_kinds(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "i.yaml").write_text(
        "- {hardware: b300, nodes: 3}\n- {hardware: h200, nodes: 4}\n- {hardware: h200}\n- {hardware: h100}\n"
        "- {hardware: ascend-910c, nodes: 9}\n- {hardware: b300, gpus: 2, nodes: 5}\n"
    )
    document = plan(f"--inventory {tmp_path}/i.yaml --json").json
    shares = [
        (group["hardware"], group["gpus_per_node"], group["nodes"], group["replicas"], group["idle_nodes"])
        for group in document["groups"]
    ]
    assert shares == [
        ("b300", 8, 3, 3, 0),
        ("h200", 8, 5, 2, 1),
        ("h100", 8, 1, 0, 1),
        ("ascend_910c", 16, 9, 2, 1),
        ("b300", 2, 5, 1, 1),
    ]
    assert document["replicas"] == sum(group["replicas"] for group in document["groups"])
    for group in document["groups"]:
        assert bool(group["refusal"]) == (group["plan"] is None)
        if group["plan"]:
            assert group["plan"]["nodes"] <= group["nodes"]
            assert group["plan"]["fit"]["manifest"]["ok"]


def test_an_inventory_that_runs_nothing_is_refused(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "i.yaml").write_text("- {hardware: h100}\n")
    answer = plan(f"--inventory {tmp_path}/i.yaml")
    assert answer.code == 2 and "no machine of it runs the model" in answer.err
    assert plan(f"--inventory {tmp_path}/i.yaml --hardware b300").code == 4
    assert plan(f"--inventory {tmp_path}/i.yaml --capacity").code == 4


def test_a_workload_is_sized(plan: Plan, tmp_path: Path) -> None:
    light = _trace(tmp_path / "a", [(index * 1000, 8000, 50) for index in range(100)])
    heavy = _trace(tmp_path / "b", [(index * 20, 8000, 50) for index in range(500)])
    sizes = {
        name: plan(f"--hardware b300 --workload {name} --p95 2 --json").json["workload"] for name in (light, heavy)
    }
    assert sizes[light]["replicas"] == 1 < sizes[heavy]["replicas"]
    for size in sizes.values():
        chosen = next(each for each in size["outcomes"] if each["replicas"] == size["replicas"])
        assert chosen["ttft_p95_s"] <= 2
        fewer = [each for each in size["outcomes"] if each["replicas"] < size["replicas"]]
        assert all(each["ttft_p95_s"] > 2 for each in fewer)
    # 1561 GB at 5 GB/s, then the warm-up; a faster disk loads in less.
    assert sizes[light]["load_s"] == pytest.approx(1560.86 / 5, abs=0.1)
    assert sizes[light]["start_s"] == sizes[light]["load_s"] + 120
    faster = plan(f"--hardware b300 --workload {light} --storage 20 --json").json["workload"]
    assert faster["load_s"] == pytest.approx(1560.86 / 20, abs=0.1)


@pytest.mark.parametrize(
    ("requests", "args", "message"),
    [
        ([(0, 900_000, 5)] * 20, "--hardware b300 --p95 1", "an idle one takes"),
        ([(0, 50_000, 5)] * 20, "--hardware h200 --nodes 2 --strategy multi_node_tp", "a request may have 32768"),
        ([(0, 900_000, 5)] * 20, "--hardware b200 --strategy multi_node_dep", "not one sequence"),
    ],
)
def test_a_workload_that_no_number_of_replicas_serves(
    requests: list[tuple[float, int, int]], args: str, message: str, plan: Plan, tmp_path: Path
) -> None:
    answer = plan(f"{args} --workload {_trace(tmp_path / 't', requests)}")
    assert answer.code == 2 and message in answer.err, answer.err


ARRIVALS = st.lists(
    st.builds(Arrival, st.floats(0, 100), st.integers(1, 100_000), st.integers(1, 500)), min_size=1, max_size=30
)


@given(ARRIVALS, st.integers(1, 4), st.integers(1, 4))
def test_queueing(arrivals: list[Arrival], replicas: int, slots: int) -> None:
    request = PlanRequest(recipe=builtin_recipe(), hardware=known_hardware()["b300"])
    prefill, decode = speeds(plan_or_refuse(request))
    ordered = sorted(arrivals)
    outcome = simulate(ordered, replicas, slots, prefill, decode)
    assert outcome.wait_p95 >= 0 and 0 < outcome.ttft_p50 <= outcome.ttft_p95 and 0 < outcome.busy <= 1.000001
    fastest = percentile([prefill.prefill(arrival.prompt) for arrival in ordered], 0.95)
    assert outcome.ttft_p95 >= fastest * 0.999999
    # As many replicas as requests: nobody waits.
    alone = simulate(ordered, len(ordered), slots, prefill, decode)
    assert alone.wait_p95 == 0 and alone.ttft_p95 == pytest.approx(fastest)


def test_percentile() -> None:
    assert [percentile(range(1, 101), share) for share in (0.5, 0.95, 1.0)] == [50, 95, 100]
    assert percentile([7.0], 0.95) == 7.0
