"""The space file: which execution settings a study varies, from where, and how each candidate is measured.

A space names execution keys only, so that no search can change what is learned:

    baseline: {update: compiled}                 # a whole execution; keys left out have their defaults
    factors: {micro_batch_size: [8, 16, 32], compile_mode: [default, max-autotune]}
    when: {compile_mode: {update: compiled}}     # a factor counts only where another setting has these values
    protocol: {warmup_updates: 20, windows: 3, updates_per_window: 100}
"""

import difflib
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, model_validator

from tinyllm_ray.config import Config
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.execution import ExecutionConfig
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.sections import Section
from tinyllm_ray.validation import explain
from tinyllm_ray.yamlfile import parse_yaml, read_mapping

EXECUTION_KEYS = tuple(ExecutionConfig.model_fields)


SearchWindows = Literal["by_need", "by_count"]


class Space(Section):
    """What a study may vary. Values are checked one by one here, against a recipe and a machine in `fit_space`.

    >>> from tinyllm_ray.tune import Space
    >>> space = Space(baseline={"update": "compiled"}, factors={"micro_batch_size": [8, 16], "update": ["graph"]})
    >>> space.factors["micro_batch_size"]
    (8, 16)
    """

    name: str = "custom"
    """What the study is called in reports; a file's own name where it is loaded from one."""
    baseline: ExecutionConfig
    """The execution every candidate is compared with."""
    factors: dict[str, tuple[Any, ...]]
    """Values to try, by execution key; the order of the keys is kept."""
    when: dict[str, dict[str, tuple[Any, ...]]] = Field(default_factory=dict)
    """By factor: the settings, and their values, without which the factor means nothing."""
    protocol: Protocol = Protocol()
    """How long baseline and finalists are measured, and at most every candidate."""
    search_windows: SearchWindows = "by_need"
    """by_need: what the search tries beside the baseline is timed by time and need, and stopped once it cannot win;
    by_count: everything is timed as `protocol` says."""

    @model_validator(mode="before")
    @classmethod
    def _check_keys_and_values(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        unknown = [key for key in values if key not in cls.model_fields]
        for key in unknown:
            _refuse_misplaced(str(key))
        if unknown:
            return values  # pydantic names them, and the nearest match, better than an "empty space" would
        if isinstance(values.get("baseline"), Mapping):
            for key in values["baseline"]:
                _check_key("baseline", key)
        return {**values, "factors": _parse_factors(values.get("factors")), "when": _parse_when(values.get("when"))}


def space_names() -> list[str]:
    """Names of the spaces that ship with the package."""
    return sorted(_shipped())


def load_space(name_or_path: str | Path) -> Space:
    """A space from a shipped one's name (`execution`, `packed`, `smoke`) or from a YAML file. Raises ConfigError.

    >>> from tinyllm_ray.tune import load_space
    >>> space = load_space("smoke")
    >>> space.factors["sdpa_backend"], space.protocol.windows
    (('auto', 'math'), 3)
    """
    shipped = _shipped()
    if isinstance(name_or_path, str) and name_or_path in shipped:
        source = f"space {name_or_path}"
        values = parse_yaml(shipped[name_or_path].read_text(encoding="utf-8"), source)
        return parse_space({"name": name_or_path, **values}, source)
    path = Path(name_or_path)
    if path.is_dir() or not path.exists():
        names = ", ".join(sorted(shipped)) or "none"
        raise ConfigError(f"{str(name_or_path)!r} is neither a shipped space ({names}) nor a YAML file that exists")
    return parse_space({"name": path.stem, **read_mapping(path)}, str(path))


def parse_space(values: Mapping[str, Any], source: str) -> Space:
    """A space from plain values. Raises ConfigError naming `source`, key, value and what is allowed."""
    try:
        return Space.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, Space, source)) from None


def _shipped() -> dict[str, Traversable]:
    """Shipped files by name: package data in an installed wheel, the folder beside the package in a checkout."""
    package = resources.files("tinyllm_ray")
    folder: Traversable = package / "search_spaces"
    if not folder.is_dir():
        folder = Path(str(package)).parent / "search_spaces"
    if not folder.is_dir():
        return {}
    return {file.name.removesuffix(".yaml"): file for file in folder.iterdir() if file.name.endswith(".yaml")}


def _parse_factors(factors: Any) -> dict[str, tuple[Any, ...]]:
    if not factors:
        raise ValueError("empty space: factors names nothing to vary; give a list of values for an execution key")
    if not isinstance(factors, Mapping):
        raise ValueError(f"factors: {factors!r} is not a mapping of execution keys to lists of values")
    parsed = {}
    for key, values in factors.items():
        _check_key("factors", key)
        if not isinstance(values, list | tuple):
            raise ValueError(f"factors.{key}: {values!r} is not a list; write [{values}] to try one value")
        if not values:
            raise ValueError(f"empty space: factors.{key} is an empty list; give it values or remove the key")
        parsed[key] = _parse_values(f"factors.{key}", key, values)
    return parsed


def _parse_when(when: Any) -> dict[str, dict[str, tuple[Any, ...]]]:
    parsed: dict[str, dict[str, tuple[Any, ...]]] = {}
    for key, conditions in _mapping("when", when or {}).items():
        _check_key("when", key)
        parsed[key] = {}
        for other, values in _mapping(f"when.{key}", conditions).items():
            place = f"when.{key}.{other}"
            _check_key(f"when.{key}", other)
            listed = values if isinstance(values, list | tuple) else [values]
            if not listed:
                raise ValueError(f"{place}: an empty list never holds; name the values where {key} counts")
            parsed[key][other] = _parse_values(place, other, listed)
    for key in parsed:
        _refuse_circle(key, (), parsed)
    return parsed


def _mapping(place: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{place}: {value!r} is not a mapping, like compile_mode: {{update: compiled}}")
    return value


def _refuse_circle(key: str, path: tuple[str, ...], when: Mapping[str, Mapping[str, Any]]) -> None:
    if key in path:
        raise ValueError(f"when: {' needs '.join((*path, key))}: a factor cannot depend on itself; remove one of these")
    for other in when.get(key, {}):
        _refuse_circle(other, (*path, key), when)


def _parse_values(place: str, key: str, values: list[Any] | tuple[Any, ...]) -> tuple[Any, ...]:
    """The values as ExecutionConfig reads them. Raises ValueError for one it would refuse and for one given twice."""
    field = ExecutionConfig.model_fields[key]
    annotation: Any = field.annotation
    adapter: TypeAdapter[Any] = TypeAdapter(Annotated[(annotation, *field.metadata)] if field.metadata else annotation)
    parsed: list[Any] = []
    for value in values:
        try:
            one = adapter.validate_python(value)
        except ValidationError as error:
            message = error.errors()[0]["msg"].removeprefix("Value error, ")
            hint = "; no compilation is update: eager" if key == "compile_mode" else ""
            raise ValueError(f"{place}: {value!r} is not allowed: {message[0].lower()}{message[1:]}{hint}") from None
        if one in parsed:
            raise ValueError(f"{place}: {value!r} stands twice; remove one of the two")
        parsed.append(one)
    return tuple(parsed)


def _check_key(place: str, key: Any) -> None:
    if key in ExecutionConfig.model_fields:
        return
    word = str(key).replace("-", "_")
    allowed = ", ".join(EXECUTION_KEYS)
    if recipe := _recipe_place(word):
        raise ValueError(
            f"{place}.{key}: {recipe} belongs to the recipe, which a search may not change; "
            f"a space may name execution keys only: {allowed}"
        )
    near = difflib.get_close_matches(word.removeprefix("execution."), EXECUTION_KEYS, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"{place}.{key}: there is no such execution key{hint} (allowed here: {allowed})")


def _refuse_misplaced(key: str) -> None:
    """Raises ValueError for a top-level key that is a setting of the execution or of the recipe."""
    if key in ExecutionConfig.model_fields:
        raise ValueError(f"{key}: an execution key stands under factors (as a list) or under baseline")
    if recipe := _recipe_place(key):
        raise ValueError(
            f"{key}: {recipe} belongs to the recipe, which a search may not change; "
            f"a space may name execution keys only: {', '.join(EXECUTION_KEYS)}"
        )


def _recipe_place(word: str) -> str | None:
    """`section.key` of the recipe's setting that `word` names, with or without its section."""
    for section, field in Config.model_fields.items():
        if section in {"execution", "output", "tuned"}:
            continue
        if word == section:
            return section
        assert isinstance(field.annotation, type)
        assert issubclass(field.annotation, BaseModel)
        for key in field.annotation.model_fields:
            if word in {key, f"{section}.{key}"}:
                return f"{section}.{key}"
    return None
