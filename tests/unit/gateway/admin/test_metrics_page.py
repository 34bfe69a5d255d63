"""Pages of several processes as one page."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from objectcache_gateway.admin.processes.metrics_page import labelled, merge_pages

ONE = b"""# HELP a_total How often.
# TYPE a_total counter
a_total{code="x y",b="}"} 1.0
a_total{code="z"} 2.0
# HELP g How much.
# TYPE g gauge
g 3.0
"""
OTHER = b"""# HELP g How much.
# TYPE g gauge
g 4.0
# HELP h_seconds How long.
# TYPE h_seconds histogram
h_seconds_bucket{le="+Inf"} 5.0
h_seconds_count 5.0
h_seconds_sum 6.0
# HELP a_total How often.
# TYPE a_total counter
"""


def test_families_of_one_name_stand_under_one_head_and_samples_say_whose_they_are() -> None:
    assert merge_pages({"storage": ONE, "gateway-0": OTHER}).decode() == (
        "# HELP a_total How often.\n"
        "# TYPE a_total counter\n"
        'a_total{process="storage",code="x y",b="}"} 1.0\n'
        'a_total{process="storage",code="z"} 2.0\n'
        "# HELP g How much.\n"
        "# TYPE g gauge\n"
        'g{process="storage"} 3.0\n'
        'g{process="gateway-0"} 4.0\n'
        "# HELP h_seconds How long.\n"
        "# TYPE h_seconds histogram\n"
        'h_seconds_bucket{process="gateway-0",le="+Inf"} 5.0\n'
        'h_seconds_count{process="gateway-0"} 5.0\n'
        'h_seconds_sum{process="gateway-0"} 6.0\n'
    )


def test_prometheuss_own_parser_reads_the_page() -> None:
    page = merge_pages({"storage": ONE, "gateway-0": OTHER}).decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert set(families) == {"a", "g", "h_seconds"}
    assert [sample.labels["process"] for sample in families["g"].samples] == [
        "storage",
        "gateway-0",
    ]
    assert families["a"].samples[0].labels == {"process": "storage", "code": "x y", "b": "}"}


def test_a_page_that_is_empty_adds_nothing() -> None:
    assert merge_pages({"storage": b"", "gateway-0": ONE}) == merge_pages({"gateway-0": ONE})


@pytest.mark.parametrize(
    ("sample", "wanted"),
    [
        ("a 1", 'a{p="x"} 1'),
        ('a{b="c"} 1', 'a{p="x",b="c"} 1'),
        ('a{b="c {d"} 1 1700000000', 'a{p="x",b="c {d"} 1 1700000000'),
        ("a 1 1700000000", 'a{p="x"} 1 1700000000'),
    ],
)
def test_a_sample_gets_one_more_label(sample: str, wanted: str) -> None:
    assert labelled(sample, 'p="x"') == wanted


def test_samples_of_several_storage_servers_carry_the_server() -> None:
    head = b"# HELP one What it is.\n# TYPE one gauge\n"
    pages = {"storage host-1:9100": head + b"one 1\n", "storage /run/2.sock": head + b"one 2\n"}
    assert merge_pages(pages).decode().splitlines()[2:] == [
        'one{process="storage",server="host-1:9100"} 1',
        'one{process="storage",server="/run/2.sock"} 2',
    ]
