"""Whether a resumption asks for the study that is there, and every difference where it does not."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tinyllm_ray.config import Config, identity
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.search.fitting import FittedSpace

_SHOWN_CHARACTERS = 80
_DIGITS = 12
"""Of a hash, for people."""


def settled_space(fitted: FittedSpace) -> dict[str, Any]:
    """What a space comes to on a machine, as JSON values by name."""
    protocol = fitted.protocol.model_dump(mode="json")
    settled = {
        "baseline": fitted.baseline,
        "factors": fitted.factors,
        "when": fitted.when,
        "protocol": protocol,
        "search_windows": fitted.search_windows,
    }
    values: dict[str, Any] = json.loads(json.dumps(settled))
    return values


def space_identity(fitted: FittedSpace) -> str:
    """SHA-256 over what a space comes to on a machine."""
    return identity(settled_space(fitted))


def refuse_other_study(known: Mapping[str, Any], asked: Mapping[str, Any], out: Path) -> None:
    """Raises ConfigError naming every field in which the definition `asked` is not the `known` one of `out`.

    What an earlier program did not write down is not compared.
    """
    different = [*_recipe(known, asked), *_space(known, asked), *_device(known, asked), *_tokens(known, asked)]
    different += _source(known, asked)
    if different:
        raise ConfigError(
            f"--resume: {out} holds a study of something else: {'; '.join(different)}; "
            "ask for what it was, or begin a study in another folder with --out"
        )


def _recipe(known: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    if known["recipe_identity"] == asked["recipe_identity"]:
        return []
    found: list[str] = []
    with contextlib.suppress(ValidationError):  # another version's recipe, with settings that are none any more
        # Where a cache lies and where a run is cut are no part of the recipe, which is what is to be equal.
        found = list(_differences(_recipe_of(known["recipe"]), _recipe_of(asked["recipe"])))
    return found or [_is_was("recipe identity", asked["recipe_identity"][:_DIGITS], known["recipe_identity"][:_DIGITS])]


def _recipe_of(values: Mapping[str, Any]) -> dict[str, Any]:
    recipe: dict[str, Any] = json.loads(json.dumps(Config.model_validate(values).recipe))
    return recipe


def _space(known: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    if known["space_identity"] == asked["space_identity"]:
        return []
    if known["settled_space"] is None:
        return [_is_was("space, with its protocol,", asked["space"], f"another ({known['space']})")]
    found = list(_differences(known["settled_space"], asked["settled_space"], "space "))
    names = [_is_was("space", asked["space"], known["space"])] if known["space"] != asked["space"] else []
    cores = known["cores"] not in (None, asked["cores"])
    return names + ([_is_was("cores a trial may use", asked["cores"], known["cores"])] if cores else []) + found


def _device(known: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    if known["device_kind"] is None:
        return []
    was, now = ((one["device_kind"], one["accelerators"]) for one in (known, asked))
    return [] if was == now else [_is_was("device", _device_words(*now), _device_words(*was))]


def _device_words(kind: str, accelerators: list[str]) -> str:
    return f"{kind} ({', '.join(accelerators)})" if accelerators else kind


def _tokens(known: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    was, now = (one["cache_identity"] for one in (known, asked))
    # Another study's data mode is a difference of its space.
    return [_is_was("token cache (data.cache)", now[:_DIGITS], was[:_DIGITS])] if was and now and was != now else []


def _source(known: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    was, now = (one["source"] for one in (known, asked))
    if was is None or now is None or was["sha256"] == now["sha256"]:
        return []
    return [_is_was("source of tinyllm_ray", _source_words(now), _source_words(was))]


def _source_words(source: Mapping[str, Any]) -> str:
    words = f"{source['sha256'][:_DIGITS]}"
    if source["revision"]:
        changes = {True: "with changes", False: "without changes"}.get(source["dirty"], "")
        words += f" (revision {source['revision'][:_DIGITS]} {changes})".replace(" )", ")")
    return words


def _differences(was: Mapping[str, Any], now: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name in dict.fromkeys([*was, *now]):
        before, after = (_numbered(one.get(name)) for one in (was, now))
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differences(before, after, f"{above}{name}.")
        elif before != after:
            yield _is_was(f"{above}{name}", after, before)


def _numbered(value: Any) -> Any:
    """A list of sections, as packed models have one each, as a section under each number; other values as they are."""
    sections = isinstance(value, list) and value and all(isinstance(one, dict) for one in value)
    return {str(number): one for number, one in enumerate(value)} if sections else value


def _is_was(name: str, now: Any, was: Any) -> str:
    return f"{name} is {_shown(now)}, was {_shown(was)}"


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
