"""The command line of token caches: its parser, and the request that its options make."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tinyllm_ray.command import Parser, examples_of

if TYPE_CHECKING:
    from tinyllm_ray.data.prepare import Request

_EPILOG = """examples:
  python -m tinyllm_ray.data prepare --out caches/sotu
      the default corpus, with a tokenizer trained on it
  python -m tinyllm_ray.data prepare --source books/ 'more/*.jsonl.zst' --tokenizer bpe:16000 --out caches/books
      local files: .txt, .jsonl, .json and .csv, each also .gz, .zst or .xz, and .parquet
  python -m tinyllm_ray.data prepare --source c4 --out caches/c4
      English C4 with the TinyLlama tokenizer, streamed from the hub
  python -m tinyllm_ray.data prepare --source owner/name --config en --streaming --tokenizer owner/model --out caches/x
      any data set of the hub, or a folder that save_to_disk wrote
  python -m tinyllm_ray.data verify caches/books
      reads every file again and names those that are not what the manifest says
  python -m tinyllm_ray.data info caches/books --rows 5
      what the cache is, and a few of its rows as text

A preparation that was stopped goes on when the same command runs again, and ends in the same bytes.

exit status: 0 done; 1 a fault of the program, or verify found a wrong file; 2 a mistake in the request; 130 and 143
ended by SIGINT and SIGTERM
"""

C4: Final = {
    "source": "hf:allenai/c4",
    "config": "en",
    "revision": "1588ec454efa1a09f29cd18ddd04fe05fc8653a2",
    "tokenizer": "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
    "tokenizer_revision": "59f6f375b26bde864a6ca194a9a3044570490064",
}


def build_parser() -> Parser:
    """The command line."""
    parser = Parser("python -m tinyllm_ray.data", "Make, check and describe token caches.", _EPILOG)
    commands = parser.add_subparsers(dest="command", required=True, metavar="prepare|verify|info", parser_class=_Plain)
    prepare = commands.add_parser("prepare", help="make a token cache of documents")
    _add_source(prepare)
    _add_tokens(prepare)
    verify = commands.add_parser("verify", help="read a cache again and name every file that is wrong")
    verify.add_argument("cache", type=Path)
    verify.add_argument("--workers", type=_positive, metavar="N", help="threads that read (default: the cores)")
    info = commands.add_parser("info", help="say what a cache is and show a few rows")
    info.add_argument("cache", type=Path)
    info.add_argument("--rows", type=_natural, default=3, metavar="N", help="rows to show (default: %(default)s)")
    return parser


class _Plain(Parser):
    """The parser of one command, as argparse makes it."""

    def __init__(self, prog: str, **_: object) -> None:
        super().__init__(prog, "", examples_of(_EPILOG, prog.split()[-1]))


def _add_source(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", required=True, type=Path, help="folder of the cache: new, empty, or one that was begun and stopped")
    add(
        "--source",
        nargs="+",
        default=["sotu"],
        metavar="SOURCE",
        help=(
            "sotu (the default), c4, a data set's name (hf:NAME where a file has that name too), a folder of "
            "save_to_disk, or files, folders and patterns"
        ),
    )
    data = parser.add_argument_group("data sets and tables")
    data.add_argument("--config", help="configuration of a data set")
    data.add_argument("--revision", help="revision of a data set")
    data.add_argument("--text-column", default="text", metavar="NAME", help="column with the text (default: text)")
    data.add_argument("--train-split", default="train", metavar="NAME", help="(default: train)")
    data.add_argument(
        "--validation-split",
        default="validation",
        metavar="NAME",
        help=("(default: validation; where there is none, --validation-fraction of the training split)"),
    )
    data.add_argument("--streaming", action="store_true", help="read a data set from the hub without storing it")
    files = parser.add_argument_group("documents")
    files.add_argument(
        "--documents",
        choices=("files", "lines"),
        default="files",
        help=("what a document of a .txt file is: the file, or each line (default: files)"),
    )
    files.add_argument(
        "--validation-fraction",
        type=float,
        default=0.01,
        metavar="F",
        help=("documents that become validation, by their hash, where the source names no such split (default: 0.01)"),
    )
    files.add_argument(
        "--split-long-documents",
        action="store_true",
        help=("cut documents above 64 MB, which are refused otherwise, into parts that each count as one"),
    )


def _add_tokens(parser: argparse.ArgumentParser) -> None:
    tokens = parser.add_argument_group("tokens")
    tokens.add_argument(
        "--tokenizer",
        metavar="NAME",
        help=("bpe:SIZE to train one, or what AutoTokenizer loads (default: bpe:32000; for c4 TinyLlama's)"),
    )
    tokens.add_argument("--tokenizer-revision", metavar="REVISION")
    tokens.add_argument("--seed", type=int, default=42, help="of the documents' order (default: 42)")
    tokens.add_argument(
        "--shuffle-buffer",
        type=_natural,
        default=10_000,
        metavar="DOCUMENTS",
        help=("documents held for shuffling, and 64 MB at most; 0 keeps their order (default: 10,000)"),
    )
    tokens.add_argument(
        "--shard-tokens", type=_positive, metavar="N", help=("length of a file (default: 33,554,432; for sotu 524,288)")
    )
    work = parser.add_argument_group("work, which the result does not depend on")
    work.add_argument("--workers", type=_positive, metavar="N", help="processes that tokenize (default: the cores)")
    work.add_argument("--ray", action="store_true", help="tokenize on all nodes of the Ray cluster at $RAY_ADDRESS")
    work.add_argument("--address", metavar="HOST:PORT", help="tokenize on all nodes of this Ray cluster")


def _positive(text: str) -> int:
    return _at_least(1, text)


def _natural(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    number = text.replace("_", "").replace(",", "")
    if not number.isdecimal() or int(number) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
    return int(number)


def request_of(options: argparse.Namespace) -> "Request":
    """What `prepare` was asked for."""
    from tinyllm_ray.data.cache import Preparation
    from tinyllm_ray.data.formats import Reading
    from tinyllm_ray.data.prepare import DEFAULT_SHARD_TOKENS, SHARD_TOKENS, Request
    from tinyllm_ray.data.sources import SourceOptions

    preset = C4 if options.source == ["c4"] else {}
    shard_tokens = DEFAULT_SHARD_TOKENS if options.source == ["sotu"] else SHARD_TOKENS
    return Request(
        sources=(preset["source"],) if preset else tuple(options.source),
        options=SourceOptions(
            config=options.config or preset.get("config"),
            revision=options.revision or preset.get("revision"),
            text_column=options.text_column,
            train_split=options.train_split,
            validation_split=options.validation_split,
            streaming=options.streaming or bool(preset),
            validation_fraction=options.validation_fraction,
            reading=Reading(options.text_column, options.documents == "lines", options.split_long_documents),
        ),
        tokenizer=options.tokenizer or preset.get("tokenizer", Request.tokenizer),
        tokenizer_revision=options.tokenizer_revision
        or (None if options.tokenizer else preset.get("tokenizer_revision")),
        preparation=Preparation(
            shuffle_seed=options.seed,
            shuffle_buffer_documents=options.shuffle_buffer,
            shard_tokens=options.shard_tokens or shard_tokens,
        ),
    )
