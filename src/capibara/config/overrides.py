"""``key=value`` overrides: ``model.num_layers=4``, ``num_layers=4``, ``learning_rate=1e-3``, ``pattern=ssm``.

A key is a dotted path, or a bare leaf name that only one section has. A value is read as TOML; where the
setting is a string, or the text is not TOML, it is taken as it stands, so a shell seldom needs quotes.
"""

from __future__ import annotations

import json
import re
import tomllib
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from capibara.config.problems import FORMER_NAMES, Problem, SettingsError, field_kind
from capibara.errors import did_you_mean

__all__ = ["apply_overrides", "leaf_fields", "override_names", "setting_text"]

_NONE_WORDS = ("none", "null")
_BARE = re.compile(
    r"[A-Za-z_][\w.=+-]*"
)  # of a list's entries: no TOML value, comma, quote or space at an end


def leaf_fields(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Every setting below ``model`` by dotted path, in the order they are declared."""
    leaves: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        kind, _ = field_kind(field)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            leaves.update(leaf_fields(kind, f"{prefix}{name}."))
        else:
            leaves[prefix + name] = field
    return leaves


def _resolve(key: str, leaves: Mapping[str, FieldInfo], text: str) -> str:
    section, dot, name = key.rpartition(".")
    key = f"{section}{dot}{FORMER_NAMES.get(name, name)}"
    if key in leaves:
        return key
    origin = f"override {text!r}"
    sections = sorted(
        {path[: i + 1] for path in leaves for i in range(len(path)) if path[i + 1 : i + 2] == "."}
    )
    if key in sections:
        members = [path for path in leaves if path.startswith(f"{key}.")]
        raise SettingsError(
            [Problem(key, f"is a section, expected one of its settings: {', '.join(members)}", origin)]
        )
    matches = [path for path in leaves if path.endswith(f".{key}")]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise SettingsError([Problem(key, f"is ambiguous, expected one of {', '.join(matches)}", origin)])
    candidates = [*leaves, *(path.rsplit(".", 1)[-1] for path in leaves)]
    hint = did_you_mean(key, dict.fromkeys(candidates)) or did_you_mean(
        key.rsplit(".", 1)[-1], dict.fromkeys(path.rsplit(".", 1)[-1] for path in leaves)
    )
    section = key.rpartition(".")[0]
    members = [path for path in leaves if path.rpartition(".")[0] == section] if section else []
    known = f" Known in [{section}]: {', '.join(members)}" if members else f" Sections: {', '.join(sections)}"
    raise SettingsError([Problem(key, f"there is no such setting.{hint}{known}", origin)])


def _as_toml(text: str) -> tuple[Any, bool]:
    try:
        parsed = tomllib.loads(f"v = {text}")
    except (ValueError, RecursionError):
        return None, False
    # A newline in the text could smuggle in further keys; then it is no TOML value.
    return (parsed["v"], True) if parsed.keys() == {"v"} else (None, False)


def parse_value(text: str, field: FieldInfo) -> Any:
    """Read the right-hand side of an override for ``field``; whether it fits is checked later."""
    kind, optional = field_kind(field)
    text = text.strip()
    if optional and text.lower() in _NONE_WORDS:
        return None
    value, is_toml = _as_toml(text)
    if typing.get_origin(kind) is tuple:
        if is_toml and isinstance(value, list):
            return value
        inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        parts = [part.strip() for part in inner.split(",")]
        return [part.strip("\"'") for part in parts if part]
    if kind is str:
        return value if is_toml and isinstance(value, str) else text
    if kind is bool and not is_toml and text.lower() in ("true", "false"):
        return text.lower() == "true"
    return value if is_toml else text


def setting_text(value: Any) -> str:
    """What stands behind the ``=`` for a value of ``to_dict()``: bare where that is read back as it was."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        if value and all(isinstance(each, str) and _BARE.fullmatch(each) for each in value):
            return ",".join(value)
        return json.dumps(list(value), ensure_ascii=False)
    if not isinstance(value, str):
        return repr(value)
    return json.dumps(value, ensure_ascii=False) if value != value.strip() or value[:1] in "\"'" else value


def apply_overrides(
    data: Mapping[str, Any], overrides: Iterable[str] | Mapping[str, Any], model: type[BaseModel]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Lay ``overrides`` over nested ``data``; later ones win.

    Args:
      data: nested tables as TOML gives them; not changed.
      overrides: ``"key=value"`` strings, or a mapping from key to an already typed value.
      model: the settings class that says which keys exist.

    Returns:
      The new nested tables, and for each overridden dotted key the text it came from.

    Raises:
      SettingsError: no ``=``, an unknown key, a section, or a bare name that several sections have.
    """
    if isinstance(overrides, str):
        overrides = [overrides]
    leaves = leaf_fields(model)
    merged = _copy_tables(data)
    origins: dict[str, str] = {}
    pairs = overrides.items() if isinstance(overrides, Mapping) else map(_split, overrides)
    for key, raw in pairs:
        text = f"{key}={raw}"
        path = _resolve(key, leaves, text)
        value = raw if isinstance(overrides, Mapping) else parse_value(raw, leaves[path])
        *tables, leaf = path.split(".")
        node = merged
        for table in tables:
            # A file that gives a number where a section belongs is reported by validation, not overwritten.
            node = node.setdefault(table, {})
            if not isinstance(node, dict):
                break
        else:
            for former, name in FORMER_NAMES.items():
                if name == leaf:
                    node.pop(former, None)
            node[leaf] = list(value) if isinstance(value, tuple) else value
            origins[path] = f"override {text!r}"
    return merged, origins


def override_names(overrides: Iterable[str] | Mapping[str, Any], model: type[BaseModel]) -> tuple[str, ...]:
    """The dotted keys of the settings that ``overrides`` name.

    Raises:
      SettingsError: as :func:`apply_overrides`.
    """
    return tuple(apply_overrides({}, overrides, model)[1])


def _split(text: str) -> tuple[str, str]:
    key, equals, value = str(text).partition("=")
    if not equals or not key.strip():
        raise SettingsError(
            [Problem("", f"got {text!r}, expected key=value, such as model.num_layers=4", "override")]
        )
    return key.strip(), value


def _copy_tables(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy_tables(value) if isinstance(value, Mapping) else value for key, value in data.items()}
