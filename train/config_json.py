"""Settings as `config.json` keeps them (resume, sample, report), flat and compared."""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any, TypeVar

from train.config import ConfigError, require
from train.settings import Settings
from yafsdp_fn.util import strict_json
from yafsdp_fn.util.schema import typed_at

T = TypeVar("T")
C = TypeVar("C", bound=Settings)


def to_json(config: Settings) -> str:
    return json.dumps({"command": config.COMMAND} | dataclasses.asdict(config), indent=2, default=str) + "\n"


def from_json(path: Path, kind: type[C]) -> C:
    """The config of an earlier run of `kind`. Settings that it does not have yet take their defaults."""
    try:
        values = strict_json.loads(path.read_text(encoding="utf-8"))
        command = values.pop("command", kind.COMMAND) if isinstance(values, dict) else kind.COMMAND
        require(command == kind.COMMAND, f"it is of `python -m train {command!s:.60}`, not of `{kind.COMMAND}`")
        return _build(kind, values, "")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: not a folder that `python -m train clm` made?") from None
    except (OSError, ValueError, OverflowError, RecursionError) as error:  # ConfigErrors of settings, too
        raise ConfigError(f"{path} cannot be read as the config of a run: {error!s:.500}") from None


def _build(cls: type[T], values: Any, prefix: str) -> T:
    """A (nested) dataclass from what JSON kept of it."""
    require(isinstance(values, dict), f"expected an object of settings for {prefix or 'all'}, got {values!r:.60}")
    kinds = typing.get_type_hints(cls)
    for name in values:
        require(name in kinds, f"there is no setting {prefix + name!r:.80}")
    return cls(**{name: _value(kinds[name], value, prefix + name) for name, value in values.items()})


def _value(kind: Any, value: Any, name: str) -> Any:
    """Turns JSON's `value` into the `kind` that the setting `name` is declared with."""
    if dataclasses.is_dataclass(kind):
        return _build(typing.cast(type, kind), value, f"{name}.")
    if typing.get_origin(kind) is tuple and isinstance(value, list):
        return tuple(_value(typing.get_args(kind)[0], each, f"{name}[{at}]") for at, each in enumerate(value))
    if kind in (str, Path) and isinstance(value, str):  # a file's name may be no UTF-8, of which the schema takes none
        return kind(value)
    return typed_at(name, str if kind is Path else kind, value)


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """`{dotted field: value}` of a (nested) config."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        out |= (
            flat(value, f"{prefix}{field.name}.") if dataclasses.is_dataclass(value) else {prefix + field.name: value}
        )
    return out


def differences(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """`{dotted field: (old value, new value)}` of two configs of one type."""
    before = flat(old)
    after = flat(new)
    return {name: (before[name], value) for name, value in after.items() if before[name] != value}
