"""Predictions for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from objectcache_schemas.limits import BYTES_PER_GBIT
from objectcache_storage_server.what_if.prediction import Prediction


def as_json(predictions: Sequence[Prediction], cap_gbps: float, *, as_list: bool) -> str:
    """An object for one policy, or a list of such objects. Figures are not rounded."""
    documents = [_document(prediction, cap_gbps) for prediction in predictions]
    return json.dumps(documents if as_list else documents[0], indent=2, allow_nan=False)


def _document(prediction: Prediction, cap_gbps: float) -> dict[str, Any]:
    return {
        "policy": prediction.policy,
        "cap_gbps": cap_gbps,
        "requests": [
            {
                "name": request.name,
                "rate_gbps": request.rate_bytes_per_s / BYTES_PER_GBIT,
                "ttft_s": request.ttft_s,
                "stall_s": request.stall_s,
            }
            for request in prediction.requests
        ],
        "total_ttft_s": prediction.total_ttft_s,
        "total_stall_s": prediction.total_stall_s,
        "added_ttft_s": prediction.added_ttft_s,
        "lower_bound_s": prediction.lower_bound_s,
    }


def policy_table(prediction: Prediction, cap_gbps: float, alone_gbps: float) -> Table:
    """One policy: a row a request, and the totals."""
    table = _table(f"{prediction.policy}, {cap_gbps:g} Gbps")
    rate = "Gbps" if prediction.are_for_life else "average Gbps"
    for column in (rate, "TTFT ms", "stall ms"):
        table.add_column(column, justify="right")
    for request in prediction.requests:
        table.add_row(
            Text(request.name),
            _gbps(request.rate_bytes_per_s),
            _ms(request.ttft_s),
            _ms(request.stall_s),
        )
    table.add_section()
    table.add_row("total", "", _ms(prediction.total_ttft_s), _ms(prediction.total_stall_s))
    table.add_row("added", "", _ms(prediction.added_ttft_s), "")
    table.caption = _caption(prediction, alone_gbps)
    return table


def comparison_table(
    predictions: Sequence[Prediction], cap_gbps: float, alone_gbps: float
) -> Table:
    """Several policies: a column each, the rates of the requests, and the totals."""
    table = _table(f"Gbps of each request, {cap_gbps:g} Gbps in all")
    for prediction in predictions:
        table.add_column(prediction.policy.replace("_", "_\n"), justify="right")
    for rows in zip(*(prediction.requests for prediction in predictions), strict=True):
        table.add_row(Text(rows[0].name), *(_gbps(row.rate_bytes_per_s) for row in rows))
    table.add_section()
    totals = {
        "TTFT ms": [prediction.total_ttft_s for prediction in predictions],
        "stall ms": [prediction.total_stall_s for prediction in predictions],
        "added ms": [prediction.added_ttft_s for prediction in predictions],
    }
    for name, figures in totals.items():
        table.add_row(name, *map(_ms, figures))
    bound_s = predictions[0].lower_bound_s
    if bound_s is not None:
        table.add_row("of least", *(_ratio(one.added_ttft_s, bound_s) for one in predictions))
    table.caption = _caption(predictions[0], alone_gbps)
    return table


def _caption(prediction: Prediction, alone_gbps: float) -> str:
    """What the rows below the requests mean."""
    caption = f"added: to each alone at {alone_gbps:g} Gbps"
    if prediction.lower_bound_s is None:
        return caption
    return f"{caption}\nleast: no schedule adds less than {_ms(prediction.lower_bound_s)} ms"


def _table(title: str) -> Table:
    table = Table(
        box=box.SIMPLE,
        pad_edge=False,
        title=title,
        title_justify="left",
        title_style="bold",
        caption_justify="left",
    )
    table.add_column("request", overflow="fold")
    return table


def _gbps(rate_bytes_per_s: float) -> str:
    return f"{rate_bytes_per_s / BYTES_PER_GBIT:.2f}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


def _ratio(added_s: float, bound_s: float) -> str:
    """How many times the bound; where the bound is next to nothing, no ratio says anything."""
    return f"{added_s / bound_s:.2f}" if bound_s > 1e-6 else ("1.00" if added_s <= 1e-6 else "-")
