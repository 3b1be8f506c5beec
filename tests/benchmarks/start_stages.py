"""Where a training's first seconds go: the real command line in fresh processes, compile cache cold and warm.

    python tests/benchmarks/start_stages.py --config 20m-32k --set execution.update=compiled
    python tests/benchmarks/start_stages.py --config nano                         # on two CPU cores

A first run finds nothing; a cold one has the bytecode that the one before left, where torch was installed without it,
and an empty compile cache (PyTorch's and Triton's); a warm one has both. Prints a JSON line a run: seconds from the
process's start to the line of its first update, watched from outside, and what the run itself says. At the end come the
medians and the floors: the interpreter, `import torch`, with a device and a matrix product, with its compiler, and what
the training's modules import beyond torch.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_EXIT_SIGINT = 130
_STATES = {"first": 1, "cold": 1, "warm": 3}
_MODULES = "tinyllm_ray.config, tinyllm_ray.data.prepare, tinyllm_ray.train.run, tinyllm_ray.train.show"
_FLOORS = {
    "interpreter": "pass",
    "torch": "import torch",
    "torch_and_training": f"import torch, {_MODULES}",
    "torch_and_compiler": "import torch._dynamo, torch._inductor.compile_fx",
    "torch_and_matmul": "import torch; a = torch.ones(256, 256, device='cuda' if torch.cuda.is_available() else 'cpu');"
    " (a @ a).cpu()",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="nano")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    for state, runs in _STATES.items():
        parser.add_argument(f"--{state}", type=int, default=runs, help=f"{state} runs (default: {runs})")
    parser.add_argument("--floor-repeats", type=int, default=3, help="0 leaves the floors out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        caches = Path(folder, "compile")
        runs = []
        for state in [name for name in _STATES for _ in range(getattr(options, name))]:
            empty(caches, state)
            runs.append({"cache": state, **start(options, Path(tempfile.mkdtemp(dir=folder)), caches)})
            print(json.dumps(runs[-1]), flush=True)
        if options.floor_repeats:
            print(json.dumps({"floors_seconds": floors(options.floor_repeats, environment(caches))}), flush=True)
    for state in _STATES:
        if seen := [run["first_update_seconds"] for run in runs if run["cache"] == state]:
            line = {"cache": state, "runs": len(seen), "median_first_update_seconds": statistics.median(seen)}
            print(json.dumps(line), flush=True)


def empty(caches, state):
    """Remove what a run in this state must not find."""
    for part in caches.glob("*"):
        if state == "first" or (state == "cold" and part.name != "bytecode"):
            shutil.rmtree(part)


def start(options, out, caches):
    """One run, ended by SIGINT after its first update: seconds up to that, and the stages of its result."""
    command = [sys.executable, "-m", "tinyllm_ray.train", "--config", options.config, "--out", str(out)]
    for setting in [*options.set, "output.checkpoint=none"]:
        command += ["--set", setting]
    begin = time.perf_counter()
    with subprocess.Popen(
        command, env=environment(caches), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        said, seconds = [], None
        for line in process.stderr:
            said.append(line)
            if seconds is None and line.startswith("update 1/"):
                seconds = time.perf_counter() - begin
                process.send_signal(signal.SIGINT)
    if process.returncode != _EXIT_SIGINT or seconds is None:
        sys.exit(f"status {process.returncode}: {''.join(said)}")
    result = json.loads((out / "result.json").read_text())
    return {
        "first_update_seconds": round(seconds, 2),
        "process_seconds": round(time.perf_counter() - begin, 2),
        "entry_to_first_update_seconds": result.get("entry_to_first_update_seconds"),
        "start_seconds": {stage: round(value, 3) for stage, value in result["start_seconds"].items()},
    }


def floors(repeats, variables):
    """Least seconds of a fresh interpreter that does no more than the code of a floor; bytecode cached."""
    least = {}
    for name, code in _FLOORS.items():
        seconds = []
        for _ in range(repeats):
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], env=variables, check=True)
            seconds.append(time.perf_counter() - begin)
        least[name] = round(min(seconds), 2)
    beyond = least["torch_and_training"] - least["torch"]
    return least | {"training_beyond_torch": round(beyond, 2), "beyond_to_torch": round(beyond / least["torch"], 2)}


def environment(caches):
    """This process's variables with the compile cache in `caches`; bytecode goes where a training would keep it."""
    from tinyllm_ray.train.compile_cache import FOLDER_VARIABLE, bytecode_variables

    os.environ[FOLDER_VARIABLE] = str(caches)
    return os.environ | bytecode_variables()


if __name__ == "__main__":
    main()
