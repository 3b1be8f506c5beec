"""What one process compiled starts another whose cache is empty: by PyTorch's own counters, never by time."""

import hashlib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from promises import promised
from torch._dynamo.utils import counters
from torch.compiler._cache import CacheArtifactManager

from tinyllm_ray.config import Config, load
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.measure.environment import machine_fingerprint, source_identity
from tinyllm_ray.promise import CompiledFile
from tinyllm_ray.train.__main__ import main
from tinyllm_ray.train.compile_artifact import GRAPHS, ArtifactError, load_compiled, save_compiled, use_compiled
from tinyllm_ray.train.compile_cache import FOLDER_VARIABLE, cache_variables
from tinyllm_ray.train.trial import keep_compiled

MakeConfig = Callable[..., Config]

pytestmark = pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")


def attend(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Of one call into PyTorch's own kernels, which takes no C++ compiler."""
    return torch.nn.functional.scaled_dot_product_attention(query, key, query, is_causal=True)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of empty compile caches a name; the process uses that of the machine that booted last."""
    with CacheArtifactManager.with_fresh_cache():
        yield tmp_path
    torch._dynamo.reset()
    counters.clear()


def boot(machine: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As a process on another machine: nothing traced, nothing seen, another folder."""
    cache = machine / name
    for key, value in cache_variables(str(cache)).items():
        monkeypatch.setenv(key, value)
    torch._dynamo.reset()
    counters.clear()
    CacheArtifactManager.clear()
    return cache


def compile_once() -> tuple[int, int]:
    """Graphs that were found and that were not."""
    query = torch.randn(2, 2, 64, 64)
    torch.compile(attend, dynamic=False, fullgraph=True)(query, query)
    found = counters["aot_autograd"]
    return found["autograd_cache_hit"], found["autograd_cache_miss"]


@pytest.fixture
def artifact(machine: Path, monkeypatch: pytest.MonkeyPatch) -> CompiledFile:
    """Of a machine that compiled."""
    cache, path = boot(machine, "first", monkeypatch), machine / "c01.compiled"
    assert compile_once() == (0, 1)
    assert save_compiled(path, cache)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return CompiledFile(file=str(path), sha256=sha256, machine="second", source="s")


def test_an_empty_cache_has_hits(machine: Path, artifact: CompiledFile, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = boot(machine, "second", monkeypatch)
    assert use_compiled(artifact, cache, "s") == f"compiled code {artifact.file} is used"
    assert compile_once() == (1, 0)


def test_without_the_file_it_has_none(machine: Path, artifact: CompiledFile, monkeypatch: pytest.MonkeyPatch) -> None:
    boot(machine, "second", monkeypatch)
    assert compile_once() == (0, 1)


def test_a_process_that_found_all_in_its_cache_keeps_it_too(
    machine: Path, artifact: CompiledFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the candidates of a verification do, which compile nothing."""
    cache = boot(machine, "first", monkeypatch)
    assert compile_once() == (1, 0)
    assert save_compiled(machine / "again", cache)
    sha256 = hashlib.sha256((machine / "again").read_bytes()).hexdigest()
    load_compiled(machine / "again", sha256, boot(machine, "second", monkeypatch))
    assert compile_once() == (1, 0)


def test_what_compiled_nothing_keeps_nothing(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not save_compiled(machine / "nothing", boot(machine, "first", monkeypatch))
    assert not (machine / "nothing").exists()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"machine": "third"}, "it was compiled on machine third, and this is second"),
        ({"source": "t"}, "it was compiled from another version of this package"),
        ({"sha256": "0" * 64}, "it is not the file that was promised: its checksum differs"),
        ({"file": "/absent"}, "it cannot be read: No such file or directory"),
    ],
)
def test_what_does_not_fit_is_not_used_and_says_why(
    machine: Path, artifact: CompiledFile, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], line: str
) -> None:
    cache = boot(machine, "second", monkeypatch)
    said = use_compiled(artifact.model_copy(update=change), cache, "s")
    assert f"is not used: {line}" in said
    assert "\n" not in said
    assert not cache.exists(), "not a byte was written"
    assert compile_once() == (0, 1)


def test_a_folder_that_cannot_be_written_costs_the_file_alone(
    machine: Path, artifact: CompiledFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its candidate has given its result by then."""
    keep_compiled(machine / "absent" / "c01.compiled")
    assert "FileNotFoundError" in capsys.readouterr().err


def trained(config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, Config]:
    """What `train --config selected.yaml` says, and the configuration that the run keeps."""
    selected = tmp_path / "study" / "selected.yaml"
    selected.parent.mkdir()
    selected.write_text(config.to_yaml())
    assert main(["--config", str(selected), "--out", str(tmp_path / "run"), *arguments]) == 0
    return capsys.readouterr().err, load(tmp_path / "run" / "config.yaml")


class TestTraining:
    """A file that is not there does not keep a training from its end."""

    @pytest.fixture
    def selected(
        self, tiny: MakeConfig, tiny_cache: TokenCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Config:
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            monkeypatch.setenv(name, "")  # so that what the program sets is undone
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "caches"))
        compiled = {
            "file": "candidates/c01.compiled",
            "sha256": "0" * 64,
            "machine": machine_fingerprint(),
            "source": source_identity().sha256,
        }
        config = tiny(
            data={"cache": str(tiny_cache.folder)}, training={"max_updates": 2}, output={"checkpoint": "none"}
        )
        return promised(config, compiled=compiled)

    def test_it_is_looked_for_beside_the_configuration(
        self, selected: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        said, kept = trained(selected, tmp_path, capsys)
        file = tmp_path / "study/candidates/c01.compiled"
        assert said.count(f"compiled code {file} is not used: it cannot be read: No such file or directory") == 1
        assert kept.tuned is not None
        assert kept.tuned.compiled is not None
        assert kept.tuned.compiled.file == str(file), "found again from anywhere"

    def test_for_another_execution_it_is_not_looked_for(
        self, selected: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        said, _ = trained(selected, tmp_path, capsys, "--set", "execution.micro_batch_size=2")
        assert "compiled code" not in said
        assert "is of other settings" in said


class TestLibraries:
    """Shared objects of the cache that the process has loaded, which PyTorch's bundle leaves out."""

    @pytest.fixture
    def packed(self, machine: Path, artifact: CompiledFile) -> Path:
        """The file with a library beside the graphs."""
        path = Path(artifact.file)
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("inductor/ab/kernel.so", b"code")
        return path

    def load(self, path: Path, cache: Path) -> None:
        load_compiled(path, hashlib.sha256(path.read_bytes()).hexdigest(), cache)

    def test_they_are_put_where_they_came_from(
        self, machine: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cache = boot(machine, "second", monkeypatch)
        self.load(packed, cache)
        assert (cache / "inductor/ab/kernel.so").read_bytes() == b"code"

    def test_one_that_is_there_stays(self, machine: Path, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A process that has it mapped would die of another file under its feet."""
        cache = boot(machine, "second", monkeypatch)
        there = cache / "inductor/ab/kernel.so"
        there.parent.mkdir(parents=True)
        there.write_bytes(b"mapped")
        inode = there.stat().st_ino
        self.load(packed, cache)
        assert (there.read_bytes(), there.stat().st_ino) == (b"mapped", inode)

    @pytest.mark.parametrize("name", ["../outside.so", "inductor/../../outside.so", "/tmp/outside-of-the-cache.so"])
    def test_none_is_put_elsewhere(
        self, machine: Path, packed: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        with zipfile.ZipFile(packed, "a") as archive:
            archive.writestr(name, b"code")
        with pytest.raises(ArtifactError, match="outside of the cache"):
            self.load(packed, boot(machine, "second", monkeypatch))
        assert not (machine / "outside.so").exists()

    def test_a_torn_file_is_an_artifact_error(
        self, machine: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for content in (packed.read_bytes()[:-100], b"", b"not a zip"):
            packed.write_bytes(content)
            with pytest.raises(ArtifactError, match="damaged"):
                self.load(packed, boot(machine, "second", monkeypatch))

    def test_graphs_of_another_pytorch_are_an_artifact_error(
        self, machine: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with zipfile.ZipFile(machine / "other", "w") as archive:
            archive.writestr(GRAPHS, b"of another kind")
        with pytest.raises(ArtifactError, match="cannot read"):
            self.load(machine / "other", boot(machine, "second", monkeypatch))
