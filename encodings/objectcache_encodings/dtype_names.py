"""What a layout's `dtype` says, as connectors write it: free text to the store."""

from __future__ import annotations

LOSSY_PREFIX = "lossy-"


def number_type(dtype: str) -> str:
    """The type of the numbers that a model computes with, without `torch.`.

    Of `lossy-q8/torch.bfloat16` it is `bfloat16`, as of `torch.bfloat16` and of vLLM's
    `auto/torch.bfloat16`; of `fp8_e4m3/torch.bfloat16` it is `fp8_e4m3`, in which its KV is kept.
    """
    parts = dtype.split("/")
    if parts[0].startswith(LOSSY_PREFIX):
        parts = parts[1:] or [""]
    if parts[0] == "auto":
        parts = parts[1:] or parts
    return parts[0].removeprefix("torch.")
