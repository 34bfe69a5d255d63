"""What the paper has for Llama 3.1 8B on an A100: tables A1 (12.5 %), A7, and A8 to A12."""

from __future__ import annotations

from dataclasses import dataclass

from objectcache_schemas.policy_names import PolicyName

TOKEN_LAYER_BYTES = 4096
NUM_LAYERS = 32
LINK_GBPS = 100.0
MARGIN_GBPS = 5.0
RATE_POLICIES: tuple[PolicyName, ...] = (
    "equal",
    "kv_prop",
    "bw_prop",
    "stall_opt",
    "calibrated_stall_opt",
)


@dataclass(frozen=True, slots=True)
class PaperRequest:
    """A prompt of `context_tokens`, of which `cached_tokens` are stored; a layer of the others is
    computed in `window_s`.
    """

    name: str
    context_tokens: int
    cached_tokens: int
    window_s: float

    @property
    def layer_bytes(self) -> int:
        """Stored bytes of one layer."""
        return self.cached_tokens * TOKEN_LAYER_BYTES


REQUESTS = {
    request.name: request
    for request in (
        PaperRequest("4K, 12.5%", 4096, 512, 0.3226 / NUM_LAYERS),
        PaperRequest("4K, 50%", 4096, 2048, 0.00579),
        PaperRequest("4K, 87.5%", 4096, 3584, 0.00198),
        PaperRequest("16K, 50%", 16384, 8192, 0.02987),
        PaperRequest("16K, 87.5%", 16384, 14336, 0.0088),
        PaperRequest("32K, 50%", 32768, 16384, 0.08091),
        PaperRequest("32K, 87.5%", 32768, 28672, 0.02385),
        PaperRequest("64K, 12.5%", 65536, 8192, 11.6438 / NUM_LAYERS),
        PaperRequest("64K, 50%", 65536, 32768, 0.27102),
        PaperRequest("64K, 87.5%", 65536, 57344, 0.07575),
    )
}


# Table A7: elements after aggregation, of chunks of 16, 64 and 256 tokens.
PAPER_ELEMENTS = {"4K, 87.5%": (448, 224, 224), "64K, 87.5%": (7168, 3584, 3584)}


@dataclass(frozen=True, slots=True)
class PaperWorkload:
    """Requests that share a cap; by request and in the order of RATE_POLICIES the rates of table A9
    and the times of tables A10 and A11; and the added times of table A12.
    """

    cap_gbps: float
    rates_gbps: dict[str, tuple[float, ...]]
    ttft_ms: dict[str, tuple[float, ...]]
    added_ttft_ms: tuple[float, ...]

    @property
    def requests(self) -> list[PaperRequest]:
        """In the tables' order."""
        return [REQUESTS[name] for name in self.rates_gbps]


WORKLOADS = {
    "A": PaperWorkload(
        80.0,
        {
            "16K, 50%": (20.0, 5.82, 7.89, 8.99, 13.99),
            "16K, 87.5%": (20.0, 10.18, 46.85, 42.25, 27.25),
            "64K, 50%": (20.0, 23.27, 3.48, 3.96, 8.96),
            "64K, 87.5%": (20.0, 40.73, 21.78, 24.81, 29.81),
        },
        {
            "16K, 50%": (1002.9, 1592.2, 1213.8, 1080.4, 1001.8),
            "16K, 87.5%": (851.0, 1577.9, 416.7, 453.5, 644.7),
            "64K, 50%": (8188.5, 8104.5, 10513.9, 9312.4, 8531.7),
            "64K, 87.5%": (3330.7, 2616.0, 3086.3, 2754.5, 2636.3),
        },
        (1288.8, 1806.3, 3146.5, 1516.7, 730.3),
    ),
    "B": PaperWorkload(
        50.0,
        {
            "16K, 50%": (12.5, 3.64, 4.93, 8.99, 8.26),
            "16K, 87.5%": (12.5, 6.36, 29.28, 12.35, 10.93),
            "64K, 50%": (12.5, 14.55, 2.17, 3.96, 8.96),
            "64K, 87.5%": (12.5, 25.45, 13.61, 24.7, 21.85),
        },
        {
            "16K, 50%": (1021.7, 2489.4, 1861.4, 1082.5, 1166.8),
            "16K, 87.5%": (1308.8, 2467.9, 608.8, 1327.8, 1473.3),
            "64K, 50%": (8448.4, 8541.0, 16443.2, 9319.5, 8524.8),
            "64K, 87.5%": (5139.7, 2714.4, 4751.4, 2788.1, 3090.4),
        },
        (3834.4, 4128.5, 11580.6, 2433.7, 2171.1),
    ),
    "C": PaperWorkload(
        50.0,
        {
            "16K, 50%": (8.33, 2.6, 3.28, 5.76, 4.97),
            "16K, 87.5%": (8.33, 4.55, 19.45, 7.62, 6.58),
            "32K, 50%": (8.33, 5.19, 2.42, 6.64, 7.03),
            "32K, 87.5%": (8.33, 9.09, 14.36, 10.78, 9.3),
            "64K, 50%": (8.33, 10.39, 1.44, 3.96, 8.96),
            "64K, 87.5%": (8.33, 18.18, 9.04, 15.24, 13.15),
        },
        {
            "16K, 50%": (1167.9, 3434.8, 2757.7, 1609.5, 1850.0),
            "16K, 87.5%": (1914.6, 3406.4, 878.9, 2067.5, 2381.4),
            "32K, 50%": (2626.0, 3563.8, 7357.9, 2841.8, 2746.2),
            "32K, 87.5%": (3785.7, 3475.9, 2274.2, 2949.3, 3403.5),
            "64K, 50%": (8302.2, 8216.7, 24447.9, 9301.6, 8231.0),
            "64K, 87.5%": (7565.0, 3678.9, 6981.1, 4299.3, 4892.7),
        },
        (9745.3, 10160.3, 29081.6, 7453.0, 7888.9),
    ),
}
