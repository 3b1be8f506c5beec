"""Packs: what goes in comes out, what is damaged or does not fit leaves nothing, and nothing is made twice."""

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from tinyllm_ray.cluster import stage_pack
from tinyllm_ray.cluster.stage_contents import with_bytecode
from tinyllm_ray.cluster.stage_files import entries
from tinyllm_ray.cluster.stage_pack import (
    MANIFEST,
    DamagedError,
    forget_damaged,
    key_of,
    make_pack,
    newest,
    read_manifest,
    unpack,
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Files of all kinds: large, empty, executable, in folders, linked."""
    root = tmp_path / "tree"
    (root / "a" / "__pycache__").mkdir(parents=True)
    (root / "b").mkdir()
    (root / "a" / "large.so").write_bytes(bytes(range(256)) * 4096)
    (root / "a" / "run").write_text("#!/bin/sh\necho ran\n")
    (root / "a" / "run").chmod(0o755)
    (root / "a" / "__pycache__" / "x.pyc").write_bytes(b"bytecode")
    for number in range(40):
        (root / "b" / f"file {number}é").write_text(f"{number}\n" * number)
    os.utime(root / "b" / "file 7é", ns=(1_600_000_000_123_456_789, 1_600_000_000_123_456_789))
    outside = tmp_path / "outside"
    outside.write_text("from elsewhere")
    (root / "to_file").symlink_to(outside)
    (root / "to_folder").symlink_to("a")
    (root / "to_nothing").symlink_to("nowhere")
    return root


def content(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def packed(tree: Path, packs: Path) -> Path:
    files = entries(tree)
    return make_pack(packs, "environment", key_of(files), files, python="3.12")


def test_what_was_packed_comes_out_as_it_was(tree: Path, tmp_path: Path) -> None:
    pack = packed(tree, tmp_path / "packs")
    manifest = unpack(pack, tmp_path / "out" / "deep")
    (tree / "to_nothing").unlink()
    out = tmp_path / "out" / "deep"
    assert content(out) == content(tree)
    assert subprocess.run([out / "a" / "run"], capture_output=True, text=True, check=True).stdout == "ran\n"
    # Bytecode is valid for its source's time of change.
    assert (out / "b" / "file 7é").stat().st_mtime == pytest.approx(1_600_000_000.123456789)
    assert not (out / "to_file").is_symlink(), "a link out of the tree would lead back to the shared file system"
    assert os.readlink(out / "to_folder") == "a"
    assert (manifest["python"], manifest["files"]) == ("3.12", 45)
    assert len(manifest["parts"]) > 1


def test_a_prefix_and_what_is_left_out(tree: Path) -> None:
    names = [entry.name for entry in entries(tree, "x/y", lambda name: name in ("x/y/b", "x/y/a/run"))]
    assert names == ["x/y/a/__pycache__/x.pyc", "x/y/a/large.so", "x/y/to_file", "x/y/to_folder"]


def test_the_key_is_of_names_sizes_times_and_facts_but_not_of_bytecode(tree: Path) -> None:
    before = key_of(entries(tree), "3.12")
    (tree / "a" / "__pycache__" / "y.pyc").write_bytes(b"more")
    assert key_of(entries(tree), "3.12") == before
    assert key_of(entries(tree), "3.13") != before
    os.utime(tree / "a" / "run", (1, 1))
    changed = key_of(entries(tree), "3.12")
    assert changed != before
    (tree / "a" / "run").rename(tree / "a" / "ran")
    assert key_of(entries(tree), "3.12") != changed


def test_a_pack_that_is_there_is_not_made_again(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = packed(tree, tmp_path / "packs")
    os.utime(pack / MANIFEST, (1, 1))
    monkeypatch.setattr(stage_pack, "_write_part", lambda job: pytest.fail("it is made again"))
    assert packed(tree, tmp_path / "packs") == pack
    assert (pack / MANIFEST).stat().st_mtime > 1, "a pack in use is no old one"
    assert [path.name for path in (tmp_path / "packs").iterdir()] == [pack.name]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("at", [700, -1, 100_000])
def test_one_flipped_bit_is_noticed_and_nothing_stays(tree: Path, tmp_path: Path, at: int) -> None:
    pack = packed(tree, tmp_path / "packs")
    flip(pack / "part-0.tar", at)
    with pytest.raises(DamagedError, match=r"part-0\.tar"):
        unpack(pack, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["../outside", "/outside", "folder/../../outside"])
def test_nothing_is_unpacked_outside_of_the_folder(tmp_path: Path, name: str) -> None:
    part = tmp_path / "part-0.tar"
    with tarfile.open(part, "w") as tar:
        tar.addfile(tarfile.TarInfo(name))
    target = tmp_path / "a" / "b"
    target.mkdir(parents=True)
    problem = stage_pack._read_part((tmp_path, {"file": part.name, "sha256": ""}, target))
    assert problem is not None
    assert problem.endswith(f"{name!r} would lie outside of {target}")
    assert not list(tmp_path.rglob("outside"))


def test_a_part_cut_short_or_missing_is_noticed_before_anything_is_read(tree: Path, tmp_path: Path) -> None:
    pack = packed(tree, tmp_path / "packs")
    os.truncate(pack / "part-1.tar", 1024)
    with pytest.raises(DamagedError, match="a part has not the size it had"):
        unpack(pack, tmp_path / "out")
    (pack / "part-1.tar").unlink()
    with pytest.raises(DamagedError, match="FileNotFoundError"):
        unpack(pack, tmp_path / "out")
    (pack / MANIFEST).write_text("{")
    with pytest.raises(DamagedError, match="JSONDecodeError"):
        read_manifest(pack)


def test_a_disk_with_too_little_room_is_told_before_anything_is_written(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = packed(tree, tmp_path / "packs")
    usage = stage_pack.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(stage_pack.shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    with pytest.raises(OSError, match=r"0\.00\d+ GiB are needed in .*, and 0\.0009 are free"):
        unpack(pack, tmp_path / "out")
    assert not (tmp_path / "out").exists()


OUT_OF_ROOM = """
import resource, sys
from pathlib import Path
from tinyllm_ray.cluster.stage_pack import unpack
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
except OSError as error:
    print("refused by the kernel", error.errno is not None)
"""


OUT_OF_ROOM_TO_PACK = OUT_OF_ROOM.replace(
    "import unpack", "import make_pack; from tinyllm_ray.cluster.stage_files import entries"
).replace(
    "unpack(Path(sys.argv[1]), Path(sys.argv[2]))", "make_pack(Path(sys.argv[2]), 'x', '0', entries(Path(sys.argv[1])))"
)


def test_a_write_that_the_kernel_refuses_leaves_nothing(tree: Path, tmp_path: Path) -> None:
    pack = packed(tree, tmp_path / "packs")
    command = [sys.executable, "-c", OUT_OF_ROOM, str(pack), str(tmp_path / "out")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "refused by the kernel True\n"
    assert not (tmp_path / "out").exists()


def test_a_pack_that_cannot_be_written_leaves_nothing(tree: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", OUT_OF_ROOM_TO_PACK, str(tree), str(tmp_path / "packs")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "refused by the kernel True\n"
    assert list((tmp_path / "packs").iterdir()) == []


def test_two_jobs_that_pack_at_once_leave_one_whole_pack(tree: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tinyllm_ray.cluster.stage_pack import *\n"
        "from tinyllm_ray.cluster.stage_files import entries\n"
        "files = entries(Path(sys.argv[1])); print(make_pack(Path(sys.argv[2]), 'environment', key_of(files), files))"
    )
    command = [sys.executable, "-c", code, str(tree), str(tmp_path / "packs")]
    jobs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    told = {job.communicate()[0].strip() for job in jobs}
    assert [job.returncode for job in jobs] == [0, 0, 0]
    (pack,) = (tmp_path / "packs").iterdir()
    assert told == {str(pack)}
    unpack(pack, tmp_path / "out")


def test_packs_that_no_job_used_for_a_week_go_when_another_is_made(tree: Path, tmp_path: Path) -> None:
    packs = tmp_path / "packs"
    files = entries(tree)
    old, used, other = (make_pack(packs, name, "1", files) for name in ("environment", "environment", "tokens"))
    assert old == used
    week_old = time.time() - 8 * 24 * 3600
    os.utime(old / MANIFEST, (week_old, week_old))
    os.utime(other / MANIFEST, (week_old, week_old))
    younger = make_pack(packs, "environment", "2", files)
    assert sorted(packs.iterdir()) == sorted([younger, other])
    assert newest(packs, "environment") == younger
    assert newest(packs, "compiled") is None


def test_parts_cost_about_the_same() -> None:
    def entry(number: int, size: int) -> stage_pack.Entry:
        return stage_pack.Entry(Path("x"), f"{number:05d}", size, 0, False)

    many = [entry(number, 1000) for number in range(1000)]
    groups = stage_pack._split(many, 8)
    assert [len(group) for group in groups] == [125] * 8
    assert [one for group in groups for one in group] == many
    uneven = stage_pack._split([entry(0, 10**9), *many], 8)
    assert 1 <= len(uneven) <= 8
    assert sum(map(len, uneven)) == 1001
    assert stage_pack._split([], 8) == []


def test_an_empty_pack_is_one(tmp_path: Path) -> None:
    pack = make_pack(tmp_path / "packs", "compiled", "0", [])
    assert unpack(pack, tmp_path / "out")["bytes"] == 0
    assert json.loads((pack / MANIFEST).read_text())["parts"] == []
    assert list((tmp_path / "out").iterdir()) == []


def test_a_pack_that_a_purge_has_left_parts_of_is_made_again(tree: Path, tmp_path: Path) -> None:
    """Sites remove old files of a scratch file system one by one."""
    for purged in ("part-1.tar", MANIFEST):
        pack = packed(tree, tmp_path / "packs")
        (pack / purged).unlink()
        assert newest(tmp_path / "packs", "environment") is None
        assert packed(tree, tmp_path / "packs") == pack
        read_manifest(pack)
        assert newest(tmp_path / "packs", "environment") == pack
        assert [path.name for path in (tmp_path / "packs").iterdir()] == [pack.name], "nothing of the old one is left"


def test_a_pack_that_was_found_damaged_is_made_again_by_the_next_job(tree: Path, tmp_path: Path) -> None:
    pack = packed(tree, tmp_path / "packs")
    flip(pack / "part-0.tar", 700)
    forget_damaged(pack)
    assert (pack / "part-1.tar").exists(), "who unpacks it now is not disturbed"
    unpack(packed(tree, tmp_path / "packs"), tmp_path / "out")


def test_what_a_killed_job_was_packing_goes_after_a_week(tree: Path, tmp_path: Path) -> None:
    packs = tmp_path / "packs"
    old, new = packs / ".environment-1.0123456789abcdef", packs / ".environment-2.0123456789abcdef"
    for left in (old, new):
        left.mkdir(parents=True)
    week_old = time.time() - 8 * 24 * 3600
    os.utime(old, (week_old, week_old))
    packed(tree, packs)
    assert not old.exists()
    assert new.exists(), "another job may be at it"


def test_modules_without_bytecode_get_some_that_holds_where_they_are_unpacked(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "folder" / "__pycache__").mkdir(parents=True)
    for name, text in {"one": "VALUE = 1", "has": "VALUE = 2", "template": "{% not python %}"}.items():
        (tree / "folder" / f"{name}.py").write_text(text)
    cached = Path(importlib.util.cache_from_source(str(tree / "folder" / "has.py")))
    cached.write_bytes(b"its own")
    files = entries(tree)
    pack = make_pack(tmp_path / "packs", "environment", key_of(files), with_bytecode(files))
    unpack(pack, tmp_path / "out")
    out = tmp_path / "out" / "folder"
    assert Path(importlib.util.cache_from_source(str(out / "has.py"))).read_bytes() == b"its own"
    assert not Path(importlib.util.cache_from_source(str(out / "template.py"))).exists()
    (out / "has.py").unlink()
    command = [sys.executable, "-v", "-B", "-c", "import one; print(one.VALUE, one.__file__)"]
    done = subprocess.run(command, cwd=out, capture_output=True, text=True, check=True)
    assert done.stdout == f"1 {out / 'one.py'}\n"
    assert f"{importlib.util.cache_from_source(str(out / 'one.py'))} matches {out / 'one.py'}" in done.stderr


def test_folders_of_any_number_of_files_and_depth_are_listed_whole(tmp_path: Path) -> None:
    names = {f"many/{number}" for number in range(200)} | {f"{'deep/' * 30}{number}" for number in range(3)}
    names |= {f"wide/{number}/file" for number in range(150)}
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = entries(tmp_path)
    assert [entry.name for entry in found] == sorted(names)
    assert all(entry.size == len(entry.name) and entry.path == tmp_path / entry.name for entry in found)
    (tmp_path / "nothing").mkdir()
    assert entries(tmp_path / "nothing") == []
    with pytest.raises(FileNotFoundError):
        entries(tmp_path / "nowhere")
