"""A study's folder that goes away for a while costs no file."""

from pathlib import Path

from tinyllm_ray.tune.late_files import LateFiles


def test_what_could_not_be_written_is_written_once_the_folder_is_back(tmp_path: Path) -> None:
    out, away = tmp_path / "study", tmp_path / "away"
    (out / "candidates").mkdir(parents=True)
    files = LateFiles(out)
    files.write(Path("candidates/c01.yaml"), b"one")
    out.rename(away)
    files.write(Path("candidates/c02.yaml"), b"two")
    files.write(Path("candidates/c03.yaml"), b"early")
    files.write(Path("candidates/c03.yaml"), b"three")
    assert not out.exists(), "a folder of that name would stand in the way of the real one"
    away.rename(out)
    files.catch_up()
    found = {path.name: path.read_bytes() for path in (out / "candidates").iterdir()}
    assert found == {"c01.yaml": b"one", "c02.yaml": b"two", "c03.yaml": b"three"}
    (out / "candidates" / "c01.yaml").unlink()
    files.catch_up()
    assert not (out / "candidates" / "c01.yaml").exists(), "each is written once"
