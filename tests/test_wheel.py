"""The built wheel alone, in an environment of its own, does the main job from an empty folder."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from command_line import ONE_CANDIDATE

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


@pytest.fixture
def environment() -> dict[str, str]:
    """As a user has it: nothing of this checkout is on the path, and no cluster is running."""
    return {name: value for name, value in os.environ.items() if name not in {"RAY_ADDRESS", "PYTHONPATH"}}


def test_it_holds_its_data_and_not_the_tests(python: Path, environment: dict[str, str], tmp_path: Path) -> None:
    code = (
        "import tinyllm_ray, importlib.util as u; from tinyllm_ray.config import load, preset_names;"
        "from tinyllm_ray.search.space import load_space, space_names; print(tinyllm_ray.__file__);"
        "print([name for name in preset_names() if load(name)]);"
        "print([name for name in space_names() if load_space(name)]);"
        "from tinyllm_ray.cluster.site import shipped_files; print(sorted(shipped_files()));"
        "print(u.find_spec('tests'))"
    )
    command = [python, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=True, text=True, capture_output=True)
    file, presets, spaces, cluster, tests = done.stdout.splitlines()
    assert Path(file).is_relative_to(python.parents[1])
    assert presets == str(preset_names())
    assert spaces == "['execution', 'packed', 'smoke']"
    assert cluster == str(sorted(path.name for path in (ROOT / "cluster").iterdir()))
    assert tests == "None"


def test_it_submits_jobs_from_an_empty_folder(python: Path, environment: dict[str, str], tmp_path: Path) -> None:
    arguments = ["submit", "--site", "gh200", "--dry-run", "--", "tune", "--budget", "9m"]
    command = [python, "-m", "tinyllm_ray.cluster", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=True, text=True, capture_output=True)
    assert "#SBATCH --partition=gh200" in done.stdout


@pytest.mark.long
def test_the_main_job_runs_from_an_empty_folder(
    python: Path, environment: dict[str, str], built_root: Path, tmp_path: Path
) -> None:
    space = tmp_path / "space.yaml"
    space.write_text(ONE_CANDIDATE)
    empty = tmp_path / "empty"
    empty.mkdir()
    environment["TINYLLM_RAY_CACHE"] = str(built_root)
    command = [python, "-m", "tinyllm_ray.tune", "--budget", "3m", "--space", space]
    done = subprocess.run(command, cwd=empty, env=environment, text=True, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 0, done.stderr
    (study,) = (empty / "studies").iterdir()
    assert {"selected.yaml", "summary.json", "trials.jsonl", "candidates"} <= {path.name for path in study.iterdir()}
    assert f"next: python -m tinyllm_ray.train --config studies/{study.name}/selected.yaml" in done.stderr
