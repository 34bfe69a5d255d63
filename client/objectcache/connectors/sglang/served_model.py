"""Which model an SGLang process serves: what it loaded, never what it is called by its clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from objectcache.connectors.identity.adapters import adapter_revision
from objectcache.connectors.identity.model_identity import HUB_REVISION, ModelIdentity, identify
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
    """The identity of the model at SGLang's `--model-path`, with its `--revision`, the adapters of
    `--lora-paths` and what else of its arguments changes KV.

    Raises `InvalidRequest` where there is no path, and for an adapter whose files are not known.
    """
    if not server_args.model_path:
        raise InvalidRequest("SGLang gives no model path; set --model-path")
    options = {name: getattr(server_args, name, None) for name in KV_ARGUMENTS}
    options["lora_adapters"] = _adapters(server_args, environment)
    return identify(
        server_args.model_path,
        weights_revision,
        environment,
        options=options,
        revision=getattr(server_args, "revision", None) or HUB_REVISION,
    )


def _adapters(
    server_args: Any, environment: Mapping[str, str]
) -> list[tuple[str, str, str]] | None:
    """Name, path and revision of each of `--lora-paths`; None without any.

    SGLang's page hash has their names and paths. An adapter that is loaded later has a random name
    in it, so its pages are found by nobody else and need no revision.
    """
    if getattr(server_args, "enable_lora", None) is False:
        return None
    adapters: list[tuple[str, str, str]] = []
    for name, path in _named_paths(getattr(server_args, "lora_paths", None) or []):
        revision = adapter_revision(path, environment)
        if revision is None:
            raise InvalidRequest(
                f"the files of the LoRA adapter {name!r} ({path}) are not known on this host, or "
                "are there in several versions; name its directory in --lora-paths"
            )
        adapters.append((name, path, revision))
    return sorted(adapters) or None


def _named_paths(lora_paths: Any) -> list[tuple[str, str]]:
    """Names and paths, in any form that SGLang takes them in."""
    if isinstance(lora_paths, Mapping):
        return [(str(name), str(path)) for name, path in lora_paths.items()]
    named: list[tuple[str, str]] = []
    for entry in lora_paths:
        if isinstance(entry, str):
            name, _, path = entry.partition("=")
            named.append((name, path or name))
        elif isinstance(entry, Mapping):
            named.append((str(entry["lora_name"]), str(entry["lora_path"])))
        else:
            named.append((str(entry.lora_name), str(entry.lora_path)))
    return named


def published_arguments() -> Any:
    """The process's own server arguments.

    HiCache tells its storage the name that a model is served under, which another model may have
    too. Raises `InvalidRequest` where SGLang has published no arguments.
    """
    from sglang.srt.runtime_context import get_server_args  # pyright: ignore[reportMissingImports]

    try:
        return get_server_args()
    except ValueError as error:
        raise InvalidRequest(
            f"SGLang does not tell which model it has loaded ({error}), and pages cannot be named "
            "by the alias that it is served under; start it by sglang.launch_server"
        ) from error
