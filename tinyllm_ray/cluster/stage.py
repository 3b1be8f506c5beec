"""Copies of a job's packages, tokens and compiled code on its nodes' own storage, made before anything is imported.

    python -m tinyllm_ray.cluster.stage pack --packs DIR -- tune --budget 45m
        makes the packs, on any machine
    python -m tinyllm_ray.cluster.stage unpack '{"packs": {...}, "job": 17, ...}'
        on a node, started by the launcher
    python -m tinyllm_ray.cluster.stage collect --packs DIR FOLDER
        keeps what was compiled

Packs lie on the shared file system, and are made once: the second job with equal contents takes them as they are. A
part that is damaged, or does not fit, is left out with a warning, and the shared one is read as without staging.
"""

import argparse
import json
import os
import shutil
import sys
import time
import venv
from pathlib import Path
from typing import Any

from tinyllm_ray.cluster.node_folder import claim, job_folder
from tinyllm_ray.cluster.stage_pack import DamagedError, forget_damaged, unpack
from tinyllm_ray.cluster.stage_place import COMPILED, ENVIRONMENT, NAME, RECORD, stage_folder
from tinyllm_ray.command import Parser, exit_status
from tinyllm_ray.errors import EXIT_DONE


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    options = build_parser().parse_args(arguments)
    commands = {"pack": _pack, "unpack": _unpack, "collect": _collect}

    def run() -> int:
        print(json.dumps(commands[options.action](options)), flush=True)
        return EXIT_DONE

    return exit_status(run)


def build_parser() -> Parser:
    """The command line."""
    parser = Parser("python -m tinyllm_ray.cluster.stage", "Stage a job's files on its nodes.", __doc__ or "")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = actions.add_parser(
            name, help=text, prog=f"{parser.prog} {name}", description=text, epilog=""
        )
        return added

    pack = add("pack", "Make the packs that a command needs, and print where they are.")
    pack.add_argument("--packs", type=Path, metavar="DIR", help="on a file system that all nodes see")
    pack.add_argument("--without-environment", action="store_true", help="as packages are in a container's image")
    pack.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    add("unpack", "Unpack on this node.").add_argument("told", type=json.loads)
    collect = add("collect", "Make a pack of what was compiled.")
    collect.add_argument("--packs", type=Path, metavar="DIR")
    collect.add_argument("folder", type=Path)
    return parser


def packs_folder(given: str | Path | None) -> Path:
    """Where packs lie: beside the token caches where nothing is said."""
    if given is not None:
        return Path(given).expanduser().absolute()
    from tinyllm_ray.data.prepare import cache_root

    return cache_root() / "packs"


def _pack(options: argparse.Namespace) -> dict[str, Any]:
    from tinyllm_ray.cluster.stage_contents import make_packs

    began = time.monotonic()
    command = options.words[1:] if options.words[:1] == ["--"] else options.words
    made = make_packs(packs_folder(options.packs), command, not options.without_environment)
    packs = {name: str(folder) for name, folder in made.folders.items()}
    return {"packs": packs, "notes": made.notes, "seconds": time.monotonic() - began}


def _unpack(options: argparse.Namespace) -> dict[str, Any]:
    told = options.told
    return unpack_here(told["packs"], told["job"], told["scratch"])


def _collect(options: argparse.Namespace) -> dict[str, Any]:
    from tinyllm_ray.cluster.stage_contents import collect_compiled

    found = collect_compiled(packs_folder(options.packs), options.folder)
    return {"pack": str(found) or None}


def unpack_here(packs: dict[str, str], job: int, scratch: str) -> dict[str, Any]:
    """Unpack all packs on this node, for one job; what became of each, for the launcher.

    Raises ConfigError where the job's folder cannot be had.
    """
    began = time.monotonic()
    own = job_folder(scratch, os.getuid(), job)
    lock = claim(own)  # until all is there, as a folder that nobody holds is somebody's leavings
    folder = stage_folder(own, os.getuid(), job)
    shutil.rmtree(folder, ignore_errors=True)
    said: dict[str, Any] = {"node": os.environ.get("SLURMD_NODENAME", os.uname().nodename), "bytes": 0, "problems": {}}
    done = []
    for name, pack in packs.items():
        try:
            said["bytes"] += _place(name, Path(pack), folder)["bytes"]
            done.append(name)
        except DamagedError as error:
            forget_damaged(Path(pack))
            said["problems"][name] = str(error)
        except OSError as error:
            said["problems"][name] = str(error)
    (folder / COMPILED).mkdir(mode=0o700, parents=True, exist_ok=True)  # for what this job compiles
    done = [*dict.fromkeys([*done, COMPILED])]
    (folder / RECORD).write_text(json.dumps({"whole": done}))
    os.utime(own)  # young, so that no other job's step takes it for left behind before this job's step is there
    os.close(lock)
    return said | {"whole": done, "seconds": time.monotonic() - began}


def _place(name: str, pack: Path, folder: Path) -> dict[str, Any]:
    """Unpack one pack to where it belongs; its manifest."""
    if name == ENVIRONMENT:
        made = folder / f"{NAME}-packages"
        manifest = unpack(pack, made)
        try:
            venv.EnvBuilder(symlinks=True, with_pip=False).create(folder / ENVIRONMENT)
            version = f"python{sys.version_info.major}.{sys.version_info.minor}"
            packages = folder / ENVIRONMENT / "lib" / version / "site-packages"
            shutil.rmtree(packages)
            made.rename(packages)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
        return manifest
    manifest = unpack(pack, folder / name)
    if name == COMPILED:
        _relocate(folder / name, manifest["root"])
    return manifest


def _relocate(folder: Path, root: str) -> None:
    """Triton lists a kernel's files by their whole paths, and misses all that were compiled elsewhere."""
    for path in folder.rglob("__grp__*.json"):
        path.write_text(path.read_text().replace(f'"{root}/', f'"{folder}/'))


if __name__ == "__main__":
    sys.exit(main())
