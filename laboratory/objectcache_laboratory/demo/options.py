"""What the demo can be asked to do."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from objectcache_laboratory.reference_engine.config import ModelConfig
from objectcache_schemas.errors import InvalidRequest

QUESTIONS = (
    "What is this document about?",
    "Which part of it would you read first, and why?",
    "What does it promise, and to whom?",
    "What would you ask its authors?",
)
DEFAULT_OUTPUT_DIR = Path("demo-output")
# 24 KiB of KV a token: 60 MiB for the default document, which takes a second or two to recompute.
DEFAULT_MODEL = ModelConfig(hidden=384, mlp_hidden=1024)


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of one run. Raises `InvalidRequest` when built with a value out of bounds."""

    document: Path | None = None  # None: the project's own documentation
    document_tokens_max: int = 2560  # of the document
    turns: int = len(QUESTIONS)
    answer_tokens: int = 16
    chunk_tokens: int = 32
    link_gbit_per_s: int = 5  # of the second path; 0 leaves it out
    slow_link_gbit_per_s: int = 1  # over which one turn is fetched encoded, too; 0 leaves it out
    model: ModelConfig = DEFAULT_MODEL
    output_dir: Path = DEFAULT_OUTPUT_DIR  # of the timeline and the server's log
    json_file: Path | None = None
    start_timeout_s: float = 120.0  # for the server to come up, on a busy machine too

    def __post_init__(self) -> None:
        for name, lowest, highest in (
            ("turns", 2, len(QUESTIONS)),
            ("answer_tokens", 1, 1024),
            ("chunk_tokens", 1, 1024),
            ("link_gbit_per_s", 0, 400),
            ("slow_link_gbit_per_s", 0, 400),
            ("document_tokens_max", self.chunk_tokens, 32_768),
        ):
            value: int = getattr(self, name)
            if not lowest <= value <= highest:
                flag = "--" + name.replace("_", "-")
                raise InvalidRequest(f"{flag} must be from {lowest} to {highest}, got {value}")

    @property
    def svg_file(self) -> Path:
        """Where the timeline is drawn."""
        return self.output_dir / "timeline.svg"

    @property
    def server_log_file(self) -> Path:
        """Where the server's log is left."""
        return self.output_dir / "server.log"


def parse_options(arguments: Sequence[str]) -> DemoOptions:
    """Options from a command line; exits as argparse does on wrong flags.

    Raises `InvalidRequest` for a value out of bounds.
    """
    given = _parser().parse_args(arguments)
    return DemoOptions(
        document=given.document,
        document_tokens_max=given.document_tokens_max,
        turns=given.turns,
        answer_tokens=given.answer_tokens,
        chunk_tokens=given.chunk_tokens,
        link_gbit_per_s=given.link_gbit_per_s,
        slow_link_gbit_per_s=given.slow_link_gbit_per_s,
        output_dir=given.output_dir,
        json_file=given.json,
    )


def _parser() -> argparse.ArgumentParser:
    default = DemoOptions()
    parser = argparse.ArgumentParser(
        "objectcache demo",
        description="Prefill a document, store its KV, and reuse it layer by layer in later turns.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="Compute takes all cores. With OPENBLAS_NUM_THREADS=1 in the environment it leaves "
        "the others to the delivery, as a GPU would, and overlaps better on a small machine.",
    )
    parser.add_argument(
        "--document", type=Path, metavar="FILE", help="text to talk about; by default our own"
    )
    parser.add_argument(
        "--document-tokens-max",
        type=int,
        default=default.document_tokens_max,
        metavar="N",
        help="use at most this many bytes of it; a token is a byte",
    )
    parser.add_argument(
        "--turns",
        type=int,
        default=default.turns,
        metavar="N",
        help=f"turns of the conversation, 2 to {len(QUESTIONS)}",
    )
    parser.add_argument(
        "--answer-tokens",
        type=int,
        default=default.answer_tokens,
        metavar="N",
        help="tokens generated in each turn",
    )
    parser.add_argument(
        "--chunk-tokens",
        type=int,
        default=default.chunk_tokens,
        metavar="N",
        help="tokens of one stored chunk",
    )
    parser.add_argument(
        "--link-gbit-per-s",
        type=int,
        default=default.link_gbit_per_s,
        metavar="N",
        help="also fetch over a link of this rate, paced on this host; 0: do not",
    )
    parser.add_argument(
        "--slow-link-gbit-per-s",
        type=int,
        default=default.slow_link_gbit_per_s,
        metavar="N",
        help="fetch the last turn's prefix over such a link, too, plain and encoded; 0: do not",
    )
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=default.output_dir,
        metavar="DIR",
        help="where timeline.svg and server.log are written",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")
    return parser
