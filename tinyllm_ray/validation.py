"""Turns pydantic's findings into one line that names the key, the value, what is allowed and the nearest match."""

import difflib
from collections.abc import Iterator
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError

_PLAINER: Final = {
    "bool_type": "input should be true or false",
    "bool_parsing": "input should be true or false",
    "model_type": "input should be keys and values",
}
"""By pydantic's name of a finding, where its own words are Python's."""


def explain(error: ValidationError, model: type[BaseModel], source: str) -> str:
    """The first finding of `error` on one line, with a count of the others."""
    findings = error.errors(include_url=False)
    # An unknown key is usually the cause of a missing one, so it goes first.
    first = min(findings, key=lambda finding: finding["type"] != "extra_forbidden")
    path = [str(part) for part in first["loc"] if part != "function-after"]
    key = ".".join(path)
    if first["type"] == "extra_forbidden":
        line = f"{source}: {key}: there is no such key{_suggest(path, model)}"
    elif first["type"] == "missing":
        line = f"{source}: {key} is missing"
    else:
        message = _PLAINER.get(first["type"]) or first["msg"].removeprefix("Value error, ")
        message = message[0].lower() + message[1:]
        shown = "" if isinstance(first["input"], dict | BaseModel) else f"{first['input']!r} is not allowed: "
        line = f"{source}: {key + ': ' if key else ''}{shown}{message}"
    others = len(findings) - 1
    return line + (f" (and {others} more)" if others else "")


def _suggest(path: list[str], model: type[BaseModel]) -> str:
    known = list(_key_paths(model))
    section = tuple(part for part in path[:-1] if not part.isdigit())  # an entry of a list is not part of a key
    name = path[-1].replace("-", "_")
    siblings = [place[-1] for place in known if place[:-1] == section]
    nearest = (
        [place for place in known if place[-1] == name]
        + [(*section, match) for match in difflib.get_close_matches(name, siblings, n=1, cutoff=0.5)]
        + [place for match in _close(name, [place[-1] for place in known]) for place in known if place[-1] == match]
    )
    hint = f"; did you mean {'.'.join(nearest[0])}?" if nearest else ""
    return f"{hint} (allowed here: {', '.join(siblings)})"


def _close(name: str, keys: list[str]) -> list[str]:
    """Keys anywhere that `name` may stand for: misspelt, without its first word, or by its initials, like `lr`."""
    shorter = [key for key in keys if key.endswith(f"_{name}")]
    initials = [key for key in keys if len(name) > 1 and "".join(part[0] for part in key.split("_")).endswith(name)]
    return shorter + difflib.get_close_matches(name, keys, n=1, cutoff=0.7) + initials


def _key_paths(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, field in model.model_fields.items():
        yield (*prefix, name)
        for inner in _models_in(field.annotation):
            yield from _key_paths(inner, (*prefix, name))


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The model that a key holds, by itself, in a list or in place of null."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)
