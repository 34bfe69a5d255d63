"""A plug-in of vLLM's: asynchronous scheduling on a CPU, where vLLM turns it off by itself.

On GPUs it is the default, and what a load that fails leaves behind is another matter with it.
"""

from __future__ import annotations

from typing import Any

from vllm.platforms.cpu import CpuPlatform


def force() -> None:
    """Called by vLLM in each of its processes."""
    given = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        given(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
