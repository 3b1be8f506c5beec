"""A site's settings: one file, and mistakes in it answered in one line."""

from pathlib import Path

import pytest

from tinyllm_ray.cluster.site import Site, load_site, shipped_files
from tinyllm_ray.errors import ConfigError


def load(folder: Path, text: str) -> Site:
    (folder / "site.yaml").write_text(text)
    return load_site(str(folder / "site.yaml"))


def test_the_shipped_example_is_one() -> None:
    assert {"ray_cluster.sbatch", "gh200.yaml", "local_slurm.sh"} <= set(shipped_files())
    site = load_site("gh200")
    assert (site.gpus_per_node, site.cpus_per_node, site.time) == (4, 288, "1:00:00")


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert load(tmp_path, "") == Site()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("acount: a", "acount: there is no such key; did you mean account?"),
        ("account: 'a b'", "account: 'a b' is not allowed: spaces"),
        ('account: "a\\n#SBATCH --uid=0"', "is not allowed: spaces"),
        ("setup: ['a', \"b\\nc\"]", "is not allowed: it has to be one line"),
        ("sbatch: [--a=b --c=d]", "stands in a line of its own"),
        ("time: 1 hour", "'1 hour' is not"),
        ("gpus_per_node: -1", "gpus_per_node: -1 is not allowed"),
        ("cpus_per_node: true", "cpus_per_node: true"),
        ("modules: cuda", "modules"),
        ("- a", "site.yaml"),
    ],
)
def test_a_mistake_is_one_line_with_the_file_the_key_and_the_value(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    message = str(caught.value)
    assert "\n" not in message
    assert str(tmp_path / "site.yaml") in message
    assert said in message or said.replace("true", "True") in message


def test_a_file_that_is_not_there_names_the_shipped_ones() -> None:
    with pytest.raises(ConfigError, match=r"'gh300' is neither a shipped site \(gh200\)"):
        load_site("gh300")
