"""Which model an SGLang process serves: what it loaded, never what it is called by its clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from objectcache.connectors.model_identity import ModelIdentity, identify
from objectcache_schemas.errors import InvalidRequest

# Arguments of SGLang that change KV under one model path, beside what every key has anyway.
KV_ARGUMENTS = (
    "load_format",
    "model_loader_extra_config",
    "model_impl",
    "model_config_parser",
    "json_model_override_args",
    "decrypted_config_file",
    "dtype",
    "quantization",
    "quantization_param_path",
    "quantize_and_serve",
    "rl_quant_profile",
    "modelopt_quant",
    "modelopt_checkpoint_restore_path",
    "kv_cache_dtype",
)


def identity_of(
    server_args: Any, weights_revision: str, environment: Mapping[str, str]
) -> ModelIdentity:
    """The identity of the model at SGLang's `--model-path`, with its `--revision` and what else of
    its arguments changes KV.

    Raises `InvalidRequest` where there is no path.
    """
    if not server_args.model_path:
        raise InvalidRequest("SGLang gives no model path; set --model-path")
    options = {name: getattr(server_args, name, None) for name in KV_ARGUMENTS}
    return identify(
        server_args.model_path,
        weights_revision,
        environment,
        options=options,
        revision=getattr(server_args, "revision", None),
    )


def published_arguments() -> Any:
    """The process's own server arguments.

    HiCache tells its storage the name that a model is served under, which another model may have
    too. Raises `InvalidRequest` where SGLang has published no arguments.
    """
    from sglang.srt.runtime_context import (  # pyright: ignore[reportMissingImports]
        get_server_args,
    )

    try:
        return get_server_args()
    except ValueError as error:
        raise InvalidRequest(
            f"SGLang does not tell which model it has loaded ({error}), and pages cannot be named "
            "by the alias that it is served under; start it by sglang.launch_server"
        ) from error
