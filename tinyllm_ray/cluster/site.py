"""A site's settings: what every job on one cluster needs beside its size and its time.

One YAML file; what is left out stays out of the script:

    account: proj42
    partition: gh200
    setup: [source /etc/profile.d/modules.sh]     # lines of shell, run before all else
    modules: [cuda/12.6, gcc]
"""

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationError

from tinyllm_ray.cluster.script import check_duration, check_line, check_option, check_word
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.sections import Integer, Section
from tinyllm_ray.validation import explain
from tinyllm_ray.yamlfile import parse_yaml

Word = Annotated[str, AfterValidator(check_word)]
Line = Annotated[str, AfterValidator(check_line)]
Count = Annotated[Integer, Field(gt=0)]


class Site(Section):
    """What a site's jobs have in common; unknown keys are refused."""

    account: Word | None = None
    partition: Word | None = None
    constraint: Word | None = None
    """Features that nodes must have, like `gh200` or `gpu&hbm`."""
    gpus_per_node: Annotated[Integer, Field(ge=0)] | None = None
    cpus_per_node: Count | None = None
    """Processors a node; Slurm gives one where nobody asks."""
    memory_per_node: Word | None = None
    """As sbatch has it: `400G`; `0` is all of a node's."""
    time: Annotated[str, AfterValidator(check_duration)] | None = None
    """The job's limit, as sbatch has it."""
    sbatch: tuple[Annotated[str, AfterValidator(check_option)], ...] = ()
    """Further options of sbatch, a line each: `--exclusive`, `--reservation=lab`."""
    modules: tuple[Line, ...] = ()
    """Environment modules to load."""
    setup: tuple[Line, ...] = ()
    """Lines of shell to run before the modules are loaded."""
    python: Line | None = None
    """The interpreter on the nodes; the one that submits where nothing is said."""
    container: Line | None = None
    """A command that runs another one in a container: `apptainer exec --nv image.sif`; its python3 is used."""
    interface: Word | None = None
    """The network interface nodes talk over; that of Slurm's own addresses where nothing is said."""
    scratch: Line | None = None
    """A short folder on every node's own disk, /tmp where nothing is said."""
    packs: Line | None = None
    """A folder that all nodes see, for what `--stage` copies; beside the token caches where nothing is said."""
    login: Word | None = None
    """The host to go through to the nodes, for `dashboard`."""


def load_site(name_or_path: str) -> Site:
    """A site from a shipped file's name (`gh200`) or a YAML file. Raises ConfigError naming key, value and remedy.

    >>> from tinyllm_ray.cluster.site import load_site
    >>> load_site("gh200").gpus_per_node
    4
    """
    shipped = shipped_files()
    file: Traversable = shipped.get(f"{name_or_path}.yaml") or Path(name_or_path)
    if not file.is_file():
        names = ", ".join(name.removesuffix(".yaml") for name in sorted(shipped) if name.endswith(".yaml"))
        raise ConfigError(f"--site: {name_or_path!r} is neither a shipped site ({names}) nor a YAML file that exists")
    try:
        values = parse_yaml(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read as text: {error}") from None
    try:
        return Site.model_validate(values if values is not None else {})
    except ValidationError as error:
        raise ConfigError(explain(error, Site, str(file))) from None


def shipped_files() -> dict[str, Traversable]:
    """Files of `cluster/` by name: package data in an installed wheel, the folder beside the package in a checkout."""
    package = resources.files("tinyllm_ray")
    folders: list[Traversable] = [package / "cluster_files", Path(str(package)).parent / "cluster"]
    for folder in folders:
        if folder.is_dir():
            return {file.name: file for file in folder.iterdir() if file.is_file()}
    return {}
