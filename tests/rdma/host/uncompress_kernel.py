"""uncompress_kernel.py VMLINUZ VMLINUX: the ELF file inside a kernel image that xz has packed."""

import lzma
import sys
from pathlib import Path

XZ_MAGIC = b"\xfd7zXZ\0"
ELF_MAGIC = b"\x7fELF"


def uncompressed(image: bytes) -> bytes:
    """The first packed ELF file; a `ValueError` where there is none."""
    position = image.find(XZ_MAGIC)
    while position >= 0:
        try:
            content = lzma.LZMADecompressor().decompress(image[position:])
        except lzma.LZMAError:
            content = b""
        if content.startswith(ELF_MAGIC):
            return content
        position = image.find(XZ_MAGIC, position + 1)
    raise ValueError("no kernel packed with xz in this image")


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(uncompressed(Path(sys.argv[1]).read_bytes()))
