"""What staging costs a node and saves it: packing once, unpacking, and a training's start from either place.

    python tests/benchmarks/staged_start.py --packs /shared/packs --scratch /local/scratch [--config nano] [--out FILE]

Packs the environment of this Python, unpacks it, and starts `train` to its first update from the shared packages and
from the copies, each once cold and once warm. Cold means that the pages of the packages are dropped from the page cache
(posix_fadvise, which drops what no other process maps), so that the file system is asked for all of it; its own caches
of names, and a server's of pages, stay. Prints a JSON line a step.
"""

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tinyllm_ray.cluster.stage import unpack_here
from tinyllm_ray.cluster.stage_contents import pack_environment, package_folders
from tinyllm_ray.cluster.stage_files import entries
from tinyllm_ray.cluster.stage_pack import read_manifest
from tinyllm_ray.cluster.stage_place import ENVIRONMENT

JOB = 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--packs", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--config", default="nano")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.scratch.mkdir(parents=True, exist_ok=True)
    lines = []

    def note(step, **figures):
        lines.append({"step": step, **figures})
        print(json.dumps(lines[-1]), flush=True)

    pack, figures = timed(lambda: pack_environment(options.packs))
    manifest = read_manifest(pack)
    note("pack", files=manifest["files"], gigabytes=round(manifest["bytes"] / 1e9, 2), **figures)
    note("pack that is there", **timed(lambda: pack_environment(options.packs))[1])
    said, figures = timed(lambda: unpack_here({ENVIRONMENT: str(pack)}, JOB, str(options.scratch)))
    assert not said["problems"], said
    note("unpack", **figures)
    (folder,) = options.scratch.glob(f"tr*-{JOB}")
    staged = folder / "stage" / ENVIRONMENT
    for name, python, places in (
        ("shared", Path(sys.executable), package_folders()),
        ("staged", staged / "bin" / "python", [staged]),
    ):
        for state in ("cold", "warm"):
            if state == "cold":
                drop(places)
            note(f"first update, {name}, {state}", seconds=round(first_update(python, options.config), 1))
    note("remove", **timed(lambda: shutil.rmtree(folder))[1])
    if options.out:
        load = os.getloadavg()[1]
        facts = {"command": " ".join(sys.argv), "cores": os.cpu_count(), "load_average_5m": load, "steps": lines}
        options.out.write_text(json.dumps(facts, indent=1) + "\n")


def timed(step):
    """What a step gives, its seconds, and those of processors, its processes' included."""
    before, began = processor_seconds(), time.perf_counter()
    found = step()
    seconds = time.perf_counter() - began
    return found, {"seconds": round(seconds, 1), "processor_seconds": round(processor_seconds() - before, 1)}


def processor_seconds():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def drop(places):
    for place in places:
        for entry in entries(place):
            descriptor = os.open(entry.path, os.O_RDONLY)
            if not entry.is_link:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def first_update(python, config):
    """Seconds from the process's start to the line of its first update."""
    with tempfile.TemporaryDirectory() as out:
        command = [python, "-m", "tinyllm_ray.train", "--config", config, "--out", f"{out}/run"]
        command += ["--set", "output.checkpoint=none"]
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            seconds = None
            for line in process.stderr:
                if seconds is None and line.startswith("update 1/"):
                    seconds = time.perf_counter() - began
                    process.send_signal(signal.SIGINT)
        assert seconds is not None, process.returncode
        return seconds


if __name__ == "__main__":
    main()
