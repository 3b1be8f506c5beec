"""A path that cannot be used is one line and status 2, whatever command it was given to."""

import errno
import importlib
import os
from pathlib import Path

import pytest
from test_help import commands

from tinyllm_ray.command import Parser, exit_status
from tinyllm_ray.data.prepare import CACHE_VARIABLE
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.paths import is_there, shown, unusable
from tinyllm_ray.tune import Tuner
from tinyllm_ray.tune.folder import open_folder

LONG = "x" * 300
BELOW_A_FILE = "file/child"
FORBIDDEN = "/sys/nothing/here"
"""Where not even root may make a folder."""
TRAIN = ("--config", "nano", "--set", "training.max_updates=1", "--out")
COMMANDS = [
    ("tinyllm_ray.tune", "report", "@"),
    ("tinyllm_ray.tune", "report", "@", "@"),
    ("tinyllm_ray.train", *TRAIN, "@"),
    ("tinyllm_ray.train", *TRAIN, "@", "--resume"),
    ("tinyllm_ray.train", *TRAIN, "run", "--resume", "@"),
    ("tinyllm_ray.train", "--config", "@", "--out", "run"),
    ("tinyllm_ray.train", "--config", "nano", "--set", "data.cache=@", "--out", "run"),
    ("tinyllm_ray.train", "evaluate", "@"),
    ("tinyllm_ray.train", "evaluate", "file", "--config", "@"),
    ("tinyllm_ray.train", "export", "@", "--out", "exported"),
    ("tinyllm_ray.train", "import", "@", "--out", "imported"),
    ("tinyllm_ray.train", "report", "@"),
    ("tinyllm_ray.data", "prepare", "--out", "@"),
    ("tinyllm_ray.data", "verify", "@"),
    ("tinyllm_ray.data", "info", "@"),
    ("tinyllm_ray.cluster", "submit", "--nodes", "1", "--dry-run", "--site", "@", "--", "tune", "--budget", "1m"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands run: it holds an empty file."""
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "path", [LONG, f"a/{LONG}/b", BELOW_A_FILE, FORBIDDEN, "a\0b"], ids=lambda path: shown(path)[:20]
)
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_path_that_cannot_be_used_is_one_line(
    words: tuple[str, ...],
    path: str,
    folder: Path,
    built_root: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(built_root))
    main = importlib.import_module(f"{words[0]}.__main__").main
    try:
        status = main([word.replace("@", path) for word in words[1:]])
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr()
    assert (status, said.out) == (2, "")
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert "\0" not in said.err
    assert os.listdir(folder) == ["file"]


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("path", [LONG, BELOW_A_FILE, "file"])
def test_a_study_says_so_before_it_begins(path: str, resume: bool, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--out .*; choose another"):
        open_folder(Path(path), resume)


@pytest.mark.parametrize("path", [LONG, "a\0b"])
def test_from_python_too(path: str) -> None:
    with pytest.raises(ConfigError, match="--out "):
        Tuner(budget="1m", out=path, preset="nano")


@pytest.mark.parametrize("words", [words for words in commands() if words != ("tinyllm_ray.cluster", "submit")])
def test_every_path_option_is_looked_at_by_the_parser(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever name, so that one that is added later is as well."""

    class LookedAtError(Exception):
        pass

    def look(self: Parser, *arguments: object) -> None:
        raise LookedAtError

    monkeypatch.setattr(Parser, "parse_args", look)
    with pytest.raises(LookedAtError):
        importlib.import_module(f"{words[0]}.__main__").main(list(words[1:]))


def test_an_option_is_named_as_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser("prog", "", "")
    inner = parser.add_subparsers(parser_class=lambda prog, **_: Parser(prog, "", "")).add_parser("go")
    inner.add_argument("--two-words", type=Path)
    inner.add_argument("place", type=Path, nargs="*")
    for arguments, name in ((["--two-words", LONG], "--two-words"), (["fine", LONG], "PLACE")):
        with pytest.raises(SystemExit):
            parser.parse_args(["go", *arguments])
        assert capsys.readouterr().err.startswith(f"error: {name} xxx")


def test_what_a_file_system_takes_is_usable() -> None:
    assert unusable(Path("x" * 255)) is None
    assert unusable(Path("ü" * 127)) is None
    assert unusable(Path("ü" * 128)) == "a file's name has 255 bytes at most; choose a shorter one"
    assert unusable(Path("/".join(["x" * 200] * 21))) == "a path has 4095 bytes at most; choose a shorter one"
    assert unusable("x" * 5000) is None, "a text that is no path"


def test_a_path_that_is_not_there_is_no_mistake(folder: Path) -> None:
    (folder / "dangling").symlink_to("nowhere")
    assert [is_there(folder / name, "--out") for name in ("absent", "file", "file/child", "dangling")] == [
        False,
        True,
        False,
        False,
    ]
    (folder / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match=r"^--out loop/child: too many levels of symbolic links; choose another"):
        is_there(Path("loop/child"), "--out")


def test_a_path_is_shown_in_its_own_letters() -> None:
    assert shown("Läufe/東京 1") == "Läufe/東京 1"
    assert shown("a\0b\n\udcff") == r"a\x00b\n\udcff"


def test_a_path_that_is_closed_to_the_user_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def refused() -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "runs/theirs/checkpoints")

    assert exit_status(refused) == 2
    assert capsys.readouterr().err.startswith("error: runs/theirs/checkpoints: permission denied; choose another")


def test_other_errors_of_the_system_are_faults_of_the_program() -> None:
    def failed() -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "runs/theirs")

    with pytest.raises(OSError, match="runs/theirs"):
        exit_status(failed)
