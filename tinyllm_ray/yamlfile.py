"""YAML as people mean it: `1e-4` is a number, `off` and `no` are words, a key given twice is a mistake.

PyYAML follows YAML 1.1, where `1e-4` is text, `off` is False and the last of two equal keys wins in silence; this
loader resolves plain scalars by the YAML 1.2 core schema (https://yaml.org/spec/1.2.2/#103-core-schema).
"""

import re
from pathlib import Path
from typing import Any

import yaml

from tinyllm_ray.errors import ConfigError


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own attribute)


_DIGITS = "-+0123456789"
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"true|True|TRUE|false|False|FALSE"), list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"~|null|Null|NULL|"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?[0-9][0-9_]*"), list(_DIGITS))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
    [*_DIGITS, "."],
)
# Implicit resolvers match from the start only; the whole scalar has to fit.
for _resolvers in _Loader.yaml_implicit_resolvers.values():
    _resolvers[:] = [(tag, re.compile(f"(?:{pattern.pattern})\\Z")) for tag, pattern in _resolvers]


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node).replace("_", ""), 10)


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if not isinstance(key, str):
            raise ConfigError(f"line {line}: the key {key!r} is not a word; put it in quotes if it is meant as one")
        if key in mapping:
            raise ConfigError(f"line {line}: the key {key!r} stands twice; remove one of the two")
        mapping[key] = loader.construct_object(value_node, deep=True)
    return mapping


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def parse_yaml(text: str, source: str) -> Any:
    """The value of one YAML document. Raises ConfigError naming `source` and the line."""
    try:
        return yaml.load(text, Loader=_Loader)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or str(error).split("\n", 1)[0]
        raise ConfigError(f"{source}: {where}this is no YAML: {problem}") from None
    except (ValueError, KeyError, AttributeError) as error:  # PyYAML's own, for values that a tag does not fit
        raise ConfigError(f"{source}: this is no YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply") from None


def read_mapping(path: Path) -> dict[str, Any]:
    """A YAML file whose top level is a mapping. Raises ConfigError when it is missing, unreadable or something else."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as text: {error}") from None
    value = parse_yaml(text, str(path))
    if not isinstance(value, dict):
        kind = "empty" if value is None else f"a {type(value).__name__}"
        raise ConfigError(f"{path}: the file is {kind}; it must hold keys and values, like 'training:'")
    return value


def dump_yaml(value: Any) -> str:
    """YAML text, keys in the given order, that `parse_yaml` and any YAML 1.1 reader turn back into `value`."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=100)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # PyYAML quotes what YAML 1.1 would take for something else, which leaves out `1e-4` and `08`.
    patterns = _Loader.yaml_implicit_resolvers.get(text[:1], [])
    quoted = any(pattern.match(text) for _, pattern in patterns)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if quoted else None)


_Dumper.add_representer(str, _represent_text)
