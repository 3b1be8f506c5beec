"""The built wheel alone, in an environment of its own, does the main job from an empty folder."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tinyllm_ray.config import preset_names

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a clean environment: the wheel, with this environment's packages as its dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, ROOT], check=True)
    (wheel,) = folder.glob("tinyllm_ray-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    interpreter = folder / "venv" / "bin" / "python"
    subprocess.run([*pip, "--python", interpreter, "install", "--no-deps", wheel], check=True)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # Only the folder itself: its .pth files, an editable install of this checkout among them, are not read from here.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return interpreter


def test_it_holds_its_data_and_not_the_tests(python: Path, tmp_path: Path) -> None:
    code = (
        "import tinyllm_ray, importlib.util as u; from tinyllm_ray.config import preset_names;"
        "from tinyllm_ray.search.space import space_names; print(tinyllm_ray.__file__); print(preset_names());"
        "from tinyllm_ray.cluster.site import shipped_files; print(space_names()); print(sorted(shipped_files()));"
        "print(u.find_spec('tests'))"
    )
    lines = subprocess.run([python, "-c", code], cwd=tmp_path, check=True, text=True, capture_output=True).stdout
    file, presets, spaces, cluster, tests = lines.splitlines()
    assert Path(file).is_relative_to(python.parents[1])
    assert presets == str(preset_names())
    assert spaces == "['execution', 'packed', 'smoke']"
    assert cluster == "['gh200.yaml', 'local_slurm.sh', 'ray_cluster.sbatch']"
    assert tests == "None"


def test_it_submits_jobs_from_an_empty_folder(python: Path, tmp_path: Path) -> None:
    command = [
        python,
        "-m",
        "tinyllm_ray.cluster",
        "submit",
        "--site",
        "gh200",
        "--dry-run",
        "--",
        "tune",
        "--budget",
        "9m",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=True, text=True, capture_output=True)
    assert "#SBATCH --partition=gh200" in done.stdout


def test_the_main_job_runs_from_an_empty_folder(python: Path, built_root: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in {"RAY_ADDRESS", "PYTHONPATH"}}
    environment["TINYLLM_RAY_CACHE"] = str(built_root)
    command = [
        python,
        "-m",
        "tinyllm_ray.tune",
        "--budget",
        "3m",
        "--runs",
        "1",
        "--windows",
        "1",
        "--updates-per-window",
        "1",
    ]
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 0, done.stderr
    (study,) = (tmp_path / "studies").iterdir()
    assert {"selected.yaml", "summary.json", "trials.jsonl", "candidates"} <= {path.name for path in study.iterdir()}
    assert f"next: python -m tinyllm_ray.train --config studies/{study.name}/selected.yaml" in done.stderr
