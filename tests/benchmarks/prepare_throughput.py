"""Preparation against the `tokenizers` library alone, and the memory of its process tree.

    python tests/benchmarks/prepare_throughput.py --megabytes 128 --repeats 3 --out prepare.json

Documents of about 2 KB are made of the default corpus's paragraphs in random order and written as JSON Lines. In turn,
as often as `--repeats` says, the library encodes them (`encode_batch` over lists of 1,000 texts that are in memory
already, all its threads) and `python -m tinyllm_ray.data prepare` makes a cache of the file. The ratio is that of the
two medians, once for the whole command with its imports and once from its first to its last batch. Wall clocks mislead
where others use the cores, so the CPU seconds of both process trees are compared as well, from the first batch on.
Memory is the largest sum over the command's process tree of PSS (shared pages counted once) and of RSS, imports
included.
"""

import argparse
import json
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ALONE = """
import json, sys, time
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[2])
texts = [json.loads(line)["text"] for line in open(sys.argv[1], "rb")]
tokenizer.encode_batch(texts[:100])
before = time.process_time()
began = time.perf_counter()
tokens = 0
for start in range(0, len(texts), 1000):
    for encoding in tokenizer.encode_batch(texts[start : start + 1000], add_special_tokens=False):
        tokens += len(encoding)
print(json.dumps({"seconds": time.perf_counter() - began, "tokens": tokens, "cpu_before": before}))
"""

PREPARED = """
import functools, json, sys, time
from pathlib import Path
from tinyllm_ray.data.options import build_parser, request_of
from tinyllm_ray.data.pool import map_in_processes
from tinyllm_ray.data.prepare import prepare
from tinyllm_ray.measure.environment import usable_cores
source, tokenizer, out = sys.argv[1:]
options = build_parser().parse_args(["prepare", "--source", source, "--tokenizer", tokenizer, "--out", out])
times = []
def report(stage, done, total, detail=""):
    if stage == "tokenizing":
        times.append(time.perf_counter())
workers = functools.partial(map_in_processes, workers=usable_cores())
def mapped(function, batches):
    times.extend([time.process_time(), time.perf_counter()])
    return workers(function, batches)
prepare(request_of(options), options.out, map_batches=mapped, report=report)
print(json.dumps({"seconds": times[-1] - times[1], "cpu_before": times[0]}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="file for the result (default: printed only)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = measure(Path(name), options.megabytes, options.repeats)
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


def measure(folder: Path, megabytes: int, repeats: int) -> dict[str, Any]:
    source = folder / "input.jsonl"
    text_bytes = write_documents(source, megabytes * 10**6)
    tokenizer = train(folder / "bpe")
    alone, whole, batches, memory, cpu = [], [], [], [], {"library": [], "prepare": []}
    for _ in range(repeats):
        reported, _, peak = run(ALONE, source, tokenizer / "tokenizer.json")
        alone.append(reported["seconds"])
        cpu["library"].append(peak["cpu"] - reported["cpu_before"])
        reported, seconds, peak = run(PREPARED, source, tokenizer, folder / "cache")
        batches.append(reported["seconds"])
        whole.append(seconds)
        memory.append(peak)
        cpu["prepare"].append(peak["cpu"] - reported["cpu_before"])
        shutil.rmtree(folder / "cache")
    library = statistics.median(alone)
    return {
        "command": " ".join(["python", *sys.argv]),
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "processor": processor(),
            "python": platform.python_version(),
        },
        "versions": {name: version(name) for name in ("tokenizers", "transformers", "numpy")},
        "text_bytes": text_bytes,
        "library_seconds": alone,
        "prepare_batches_seconds": batches,
        "prepare_whole_command_seconds": whole,
        "library_cpu_seconds": cpu["library"],
        "prepare_cpu_seconds": cpu["prepare"],
        "library_mb_per_second": text_bytes / library / 1e6,
        "prepare_mb_per_second": text_bytes / statistics.median(batches) / 1e6,
        "ratio_batches": library / statistics.median(batches),
        "ratio_whole_command": library / statistics.median(whole),
        "ratio_cpu_seconds": statistics.median(cpu["library"]) / statistics.median(cpu["prepare"]),
        "load_of_all_processes": os.getloadavg()[0],
        "peak_pss_mib": max(peak["pss"] for peak in memory) / 2**20,
        "peak_rss_mib": max(peak["rss"] for peak in memory) / 2**20,
    }


def write_documents(path: Path, size: int) -> int:
    """Documents of random paragraphs, every fourth word of which is misspelt at random: else all would be cached."""
    from tinyllm_ray.data.corpus import read_corpus

    paragraphs = [part for texts in read_corpus().values() for text in texts for part in text.split("\n\n")]
    generator = random.Random(0)
    written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            text = "\n\n".join(generator.choices(paragraphs, k=4))
            text = re.sub(r"[a-z]{6,}", lambda found: misspelt(found[0], generator), text)
            file.write(json.dumps({"text": text}) + "\n")
            written += len(text.encode())
    return written


def misspelt(word: str, generator: random.Random) -> str:
    if generator.random() > 0.1:
        return word
    place = generator.randrange(len(word))
    return word[:place] + chr(97 + generator.randrange(26)) + word[place:]


def train(folder: Path) -> Path:
    from tinyllm_ray.data.corpus import read_corpus
    from tinyllm_ray.data.tokenizer import train_tokenizer

    train_tokenizer(read_corpus()["train"], 32_000, folder)
    return folder


def run(program: str, *arguments: object) -> tuple[dict[str, Any], float, dict[str, float]]:
    """What the program printed, its seconds, and of its process tree the peak memory and the CPU seconds."""
    began = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)], stdout=subprocess.PIPE, text=True)
    peak: dict[str, float] = {"pss": 0, "rss": 0}
    cpu: dict[int, float] = {}
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.25):
            members = tree(child.pid)
            cpu.update({member: seconds for member in members if (seconds := cpu_seconds(member))})
            for kind, amount in tree_memory(members).items():
                peak[kind] = max(peak[kind], amount)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        out, _ = child.communicate()
        seconds = time.perf_counter() - began
    finally:
        ended.set()
        watcher.join()
    if child.returncode:
        raise SystemExit(child.returncode)
    return json.loads(out), seconds, peak | {"cpu": sum(cpu.values())}


def cpu_seconds(process: int) -> float:
    """Of the process itself, its children left out; 0 where it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def tree(root: int) -> set[int]:
    """The process and all below it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    members, grown = {root}, True
    while grown:
        new = {child for child, parent in parents.items() if parent in members} - members
        members, grown = members | new, bool(new)
    return members


def tree_memory(members: set[int]) -> dict[str, int]:
    total = {"pss": 0, "rss": 0}
    for member in members:
        try:
            lines = Path(f"/proc/{member}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            kind = line.partition(":")[0].lower()
            if kind in total:
                total[kind] += int(line.split()[1]) * 1024
    return total


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def version(package: str) -> str:
    import importlib.metadata

    return importlib.metadata.version(package)


if __name__ == "__main__":
    main()
