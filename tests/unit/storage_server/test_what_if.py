"""What if requests shared a link: the file, the simulation, the predictions, the report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import BYTES_PER_GBIT
from objectcache_schemas.policy_names import PolicyName
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.what_if.__main__ import main
from objectcache_storage_server.what_if.prediction import POLICIES, Link, predict
from objectcache_storage_server.what_if.request_rows import ROWS_MAX, Request, read_requests
from objectcache_storage_server.what_if.simulation import LAYERS_MAX, layer_arrivals
from tests.unit.storage_server.scheduling.paper_tables import LINK_GBPS, MARGIN_GBPS, WORKLOADS

HEADER = "name,bytes_per_layer,compute_window_s,num_layers"
FOR_LIFE = ("--rates", "for_life")
GOOD = f"{HEADER}\none,1000000,0.01,32\ntwo,2000000,0.5,16\n"


def written(tmp_path: Path, content: str | bytes) -> Path:
    file = tmp_path / "requests.csv"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def paper_link(workload: str) -> Link:
    return Link(
        WORKLOADS[workload].cap_bytes_per_s,
        MARGIN_GBPS * BYTES_PER_GBIT,
        LINK_GBPS * BYTES_PER_GBIT,
    )


def paper_requests(workload: str) -> list[Request]:
    shared = WORKLOADS[workload]
    return [
        Request(name, demand)
        for name, demand in zip(shared.allocations_gbps, shared.demands, strict=True)
    ]


# --- the file ---


@pytest.mark.parametrize(
    "content",
    [
        GOOD,
        GOOD.replace("\n", "\r\n"),
        "\ufeff" + GOOD,
        GOOD.replace(",", " , "),
        GOOD.replace("one", '"one"').rstrip("\n"),
        GOOD.replace("\n", "\n\n"),
        GOOD.replace("1000000", "1e6").replace("16", "16.0"),
    ],
)
def test_a_file_is_read_however_it_was_saved(tmp_path: Path, content: str) -> None:
    assert read_requests(written(tmp_path, content)) == [
        Request("one", Demand(1_000_000, 0.01, 32, 1.0, "one")),
        Request("two", Demand(2_000_000, 0.5, 16, 1.0, "two")),
    ]


def test_columns_come_in_any_order_and_weights_and_tenants_are_read(tmp_path: Path) -> None:
    content = (
        "weight,num_layers,tenant,name,compute_window_s,bytes_per_layer\n2.5,3,blue,a,0,1000\n"
    )
    assert read_requests(written(tmp_path, content)) == [
        Request("a", Demand(1000, 0.0, 3, 2.5, "blue"))
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "empty"),
        (HEADER + "\n", "no requests"),
        ("name,bytes_per_layer,num_layers\na,1,1\n", "column compute_window_s is missing"),
        (f"{HEADER},colour\na,1,1,1,red\n", "column 'colour' is unknown"),
        (f"{HEADER},name\na,1,1,1,b\n", "column name is there twice"),
        (f"{HEADER}\na,1,,1\n", "line 2: compute_window_s is empty"),
        (f"{HEADER}\n,1,1,1\n", "line 2: name is empty"),
        (f"{HEADER}\na,1,1,1\nb,1,1\n", "line 3: a row has one value for each of 4"),
        (f"{HEADER}\na,1,1,1,1\n", "line 2: a row has one value for each of 4"),
        (f"{HEADER}\na,many,1,1\n", "bytes_per_layer must be a whole number .* got 'many'"),
        (f"{HEADER}\na,0,1,1\n", "bytes_per_layer must be a whole number from 1"),
        (f"{HEADER}\na,1.5,1,1\n", "bytes_per_layer must be a whole number"),
        (f"{HEADER}\na,1_000,1,1\n", "bytes_per_layer must be a whole number"),
        (f"{HEADER}\na,1e400,1,1\n", "bytes_per_layer must be a whole number"),
        (f"{HEADER}\na,1,nan,1\n", "compute_window_s must be a number from 0"),
        (f"{HEADER}\na,1,inf,1\n", "compute_window_s must be a number from 0"),
        (f"{HEADER}\na,1,-0.1,1\n", "compute_window_s must be a number from 0"),
        (f"{HEADER}\na,1,1,0\n", "num_layers must be a whole number from 1 to 4096"),
        (f"{HEADER}\na,1,1,5000\n", "num_layers must be a whole number from 1 to 4096"),
        (f"{HEADER}\na,1,1,1\na,2,2,2\n", "line 3: name 'a' is there twice"),
        (f"{HEADER}\na\x1b[2J,1,1,1\n", "name must be at most 128 printable characters"),
        (f"{HEADER}\n{'a' * 129},1,1,1\n", "name must be at most 128 printable characters"),
        (f"{HEADER},weight\na,1,1,1,0\n", "weight must be a number from 0.001"),
        (f'{HEADER}\n"a,1,1,1\n', "unexpected end of data"),
        (f"{HEADER},tenant,weight\na,1,1,1,t,1\nb,1,1,1,t,2\n", "tenant 't' differ in weight"),
        (b"name\xff,", "not UTF-8"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(
    tmp_path: Path, content: str | bytes, message: str
) -> None:
    file = written(tmp_path, content)
    with pytest.raises(InvalidRequest, match=message) as caught:
        read_requests(file)
    assert str(file) in caught.value.message
    assert "\n" not in caught.value.message


def test_files_that_are_not_there_or_not_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"cannot read .*absent.csv: No such file"):
        read_requests(tmp_path / "absent.csv")
    with pytest.raises(InvalidRequest, match=r"cannot read .*: Is a directory"):
        read_requests(tmp_path)


def test_a_file_has_at_most_ten_thousand_requests(tmp_path: Path) -> None:
    rows = [f"r{number},1000,0.1,1" for number in range(ROWS_MAX + 1)]
    assert len(read_requests(written(tmp_path, "\n".join([HEADER, *rows[:-1]])))) == 10_000
    with pytest.raises(InvalidRequest, match="more than 10,000 requests"):
        read_requests(written(tmp_path, "\n".join([HEADER, *rows])))


def test_a_file_that_is_too_large_is_not_read_to_its_end(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="larger than 16 MiB"):
        read_requests(written(tmp_path, b"a" * (1 << 25)))


# --- predictions ---


@pytest.mark.parametrize("workload", WORKLOADS)
def test_stall_dynamic_is_within_a_tenth_of_the_lower_bound(workload: str) -> None:
    (dynamic,) = predict(["stall_dynamic"], paper_requests(workload), paper_link(workload))
    assert dynamic.lower_bound_s is not None
    assert dynamic.lower_bound_s <= dynamic.added_ttft_s <= 1.1 * dynamic.lower_bound_s


@pytest.mark.parametrize("workload", WORKLOADS)
def test_stall_dynamic_adds_at_most_six_tenths_of_what_the_calibrated_policy_adds(
    workload: str,
) -> None:
    dynamic, calibrated = predict(
        ["stall_dynamic", "calibrated_stall_opt"], paper_requests(workload), paper_link(workload)
    )
    assert dynamic.added_ttft_s <= 0.6 * calibrated.added_ttft_s


def test_stalls_are_what_is_not_computing() -> None:
    for prediction in predict(POLICIES, paper_requests("C"), paper_link("C")):
        computing_s = sum(
            demand.num_layers * (demand.compute_window_s or 0.0)
            for demand in WORKLOADS["C"].demands
        )
        assert prediction.total_stall_s == pytest.approx(prediction.total_ttft_s - computing_s)


def test_requests_of_many_kinds_are_never_below_the_lower_bound() -> None:
    requests = [
        Request("layer", Demand(10**8, 0.5, 1, tenant="x")),
        Request("no window", Demand(10**7, 0.0, 40, weight=4.0, tenant="y")),
        Request("slack", Demand(10**6, 1.0, 80, tenant="z")),
    ]
    for prediction in predict(POLICIES, requests, Link(1e9, 1e8, 1.25e10, {"y": 5e8})):
        assert prediction.lower_bound_s is not None
        assert prediction.added_ttft_s >= prediction.lower_bound_s - 1e-6


def test_more_than_eight_requests_have_no_lower_bound() -> None:
    requests = [Request(str(number), Demand(10**6, 0.1, 4)) for number in range(9)]
    link = Link(1e9, 0.0, 1.25e10)
    assert predict(["equal"], requests, link)[0].lower_bound_s is None
    assert predict(["equal"], requests[:8], link)[0].lower_bound_s is not None


def test_the_simulation_sends_every_layer_in_order_and_keeps_the_link_busy() -> None:
    demands = WORKLOADS["B"].demands
    cap = WORKLOADS["B"].cap_bytes_per_s
    arrivals_s = layer_arrivals("stall_dynamic", demands, cap, {})
    for demand, layers_s in zip(demands, arrivals_s, strict=True):
        assert len(layers_s) == demand.num_layers
        assert layers_s == sorted(layers_s)
    last_s = max(layers_s[-1] for layers_s in arrivals_s)
    assert last_s == pytest.approx(sum(demand.payload_bytes for demand in demands) / cap, rel=0.01)


@pytest.mark.parametrize("policy", ["equal", "bw_prop"])
def test_what_an_early_finisher_leaves_is_divided_unless_rates_are_for_life(
    policy: PolicyName,
) -> None:
    requests, link = paper_requests("B"), paper_link("B")
    ((every,), (for_life,)) = (
        predict([policy], requests, link, rates) for rates in ("every_epoch", "for_life")
    )
    assert not every.are_for_life
    assert for_life.are_for_life
    assert every.added_ttft_s < for_life.added_ttft_s
    for shared, alone in zip(every.requests, for_life.requests, strict=True):
        assert shared.rate_bytes_per_s >= 0.99 * alone.rate_bytes_per_s


def test_a_tenants_cap_holds_in_the_simulation() -> None:
    demands = [Demand(10**7, 0.01, 10, tenant=tenant) for tenant in ("a", "b")]
    capped_s, free_s = layer_arrivals("stall_dynamic", demands, 1e9, {"a": 1e8})
    assert 0.98 <= capped_s[-1] <= 1.0 + 0.1  # 10^8 bytes, after at most all of the other's
    assert free_s[-1] <= 0.2


def test_a_simulation_that_would_take_too_long_is_refused() -> None:
    demands = [Demand(10**6, 0.1, 4000)] * (LAYERS_MAX // 4000 + 1)
    with pytest.raises(InvalidRequest, match=r"at most 400,000 layers .* not 404,000"):
        layer_arrivals("equal", demands, 1e9, {})


# --- the command ---


def printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, *flags: str, content: str = GOOD
) -> str:
    assert main([*flags, "--cap-gbps", "0.5", str(written(tmp_path, content))]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def test_json_of_one_policy_is_an_object_with_stable_keys(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    document: dict[str, Any] = json.loads(
        printed(capsys, tmp_path, *FOR_LIFE, "--policy", "equal", "--json")
    )
    assert list(document) == [
        *("policy", "cap_gbps", "requests", "total_ttft_s", "total_stall_s"),
        *("added_ttft_s", "lower_bound_s"),
    ]
    one, two = document["requests"]
    assert one == {
        "name": "one",
        "rate_gbps": 0.25,
        "ttft_s": pytest.approx(32 * 0.032 + 0.01),
        "stall_s": pytest.approx(0.032 + 31 * 0.022),
    }
    assert (two["rate_gbps"], two["ttft_s"]) == (0.25, pytest.approx(0.064 + 16 * 0.5))
    assert document["total_stall_s"] == pytest.approx(one["stall_s"] + two["stall_s"])
    alone_s = (1e6 + 2e6) / 12.5e9
    assert document["added_ttft_s"] == pytest.approx(document["total_stall_s"] - alone_s)


def test_json_of_all_policies_is_a_list_of_such_objects(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    documents = json.loads(printed(capsys, tmp_path, "--all", "--json"))
    assert [document["policy"] for document in documents] == list(POLICIES)
    assert {document["cap_gbps"] for document in documents} == {0.5}
    assert len({document["lower_bound_s"] for document in documents}) == 1


def test_the_table_has_a_row_a_request_with_two_decimals_and_the_totals(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = printed(capsys, tmp_path, *FOR_LIFE, "--policy", "kv_prop").splitlines()
    rows = [line.split() for line in lines]
    assert ["one", "0.25", "1,034.0", "714.0"] in rows
    assert ["two", "0.25", "8,064.0", "64.0"] in rows
    assert ["total", "9,098.0", "778.0"] in rows
    assert ["added", "777.8"] in rows
    assert any(line.strip().startswith("least: no schedule adds less than") for line in lines)


def test_the_comparison_has_a_column_a_policy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    output = printed(capsys, tmp_path, "--all")
    assert re.search(r"equal +prop +prop +opt +opt +dynamic", output)
    assert re.search(r"one( +\d+\.\d\d){6}", output)


def test_names_are_printed_as_they_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    content = GOOD.replace("one", "[red]one[/red]")
    assert "[red]one[/red]" in printed(capsys, tmp_path, "--policy", "equal", content=content)


def test_the_margin_raises_the_calibrated_rates_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    content = f"{HEADER}\na,1000000,0.1,4\n"  # 0.08 Gbps without a stall

    def rate(policy: str, margin: str) -> float:
        flags = [*FOR_LIFE, "--policy", policy, "--margin-gbps", margin, "--json"]
        document = json.loads(printed(capsys, tmp_path, *flags, content=content))
        return float(document["requests"][0]["rate_gbps"])

    assert rate("calibrated_stall_opt", "0") == pytest.approx(0.08)
    assert rate("calibrated_stall_opt", "0.1") == pytest.approx(0.18)
    assert rate("stall_opt", "0.1") == pytest.approx(0.08)


def test_weights_and_tenants_caps_reach_the_policies(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    content = f"{HEADER},weight,tenant\na,1,1,1,3,x\nb,1,1,1,1,y\nc,1,1,1,1,z\n"
    flags = [*FOR_LIFE, "--policy", "equal", "--json", "--tenant-cap", "y=0.02"]
    document = json.loads(printed(capsys, tmp_path, *flags, content=content))
    rates = [request["rate_gbps"] for request in document["requests"]]
    assert rates == pytest.approx([0.36, 0.02, 0.12])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cap-gbps", "50"], "--policy --all is required"),
        (["--all", "--policy", "equal", "--cap-gbps", "50"], "not allowed with"),
        (["--policy", "fastest", "--cap-gbps", "50"], "invalid choice: 'fastest'.*stall_dynamic"),
        (["--policy", "equal"], "--cap-gbps"),
        (["--policy", "equal", "--cap-gbps", "0"], "--cap-gbps must be more than 0"),
        (["--policy", "equal", "--cap-gbps", "-5"], "--cap-gbps must be more than 0"),
        (["--policy", "equal", "--cap-gbps", "nan"], "--cap-gbps must be more than 0"),
        (["--policy", "equal", "--cap-gbps", "inf"], "--cap-gbps must be more than 0"),
        (["--policy", "equal", "--cap-gbps", "much"], "--cap-gbps: invalid float value: 'much'"),
        (["--all", "--cap-gbps", "1", "--margin-gbps", "-1"], "--margin-gbps must be 0 or more"),
        (["--all", "--cap-gbps", "1", "--link-gbps", "0"], "--link-gbps must be more than 0"),
        (["--all", "--cap-gbps", "1", "--tenant-cap", "one"], "expected TENANT=GBPS, got 'one'"),
        (["--all", "--cap-gbps", "1", "--tenant-cap", "one=x"], "'x' is not a number"),
        (["--all", "--cap-gbps", "1", "--tenant-cap", "one=0"], "--tenant-cap one must be more"),
        (["--all", "--cap-gbps", "1", "--tenant-cap", "six=1"], "no request is of this tenant"),
        (["--all", "--cap-gbps", "1", "--rates", "ever"], "invalid choice: 'ever'.*for_life"),
        (["--all", "--cap-gbps", "1", "--unknown"], "unrecognized arguments: --unknown"),
    ],
)
def test_wrong_use_ends_with_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: list[str], message: str
) -> None:
    assert main([*flags, str(written(tmp_path, GOOD))]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert re.fullmatch(rf"objectcache schedule: .*{message}.*\n", output.err)
