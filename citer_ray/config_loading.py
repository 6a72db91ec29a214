"""From a YAML file and `section.key=value` overrides to a `CiterConfig`, and back.

Fed by the command line and `jobs/`; what it returns is read by everything. Precedence: override > file >
default. All problems of a configuration come as one `ConfigError` with one line for each. `run.yaml`, written
by every run, is a complete configuration that reproduces it.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Collection, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from citer_ray.config import CiterConfig
from citer_ray.config_schema import ConfigSchema, config_schema
from citer_ray.errors import ConfigError
from citer_ray.file_replacement import replacing
from citer_ray.redaction import MASK, redact_values
from citer_ray.storage import storage_path

RUN_YAML = "run.yaml"
_SHOWN_VALUE_LENGTH = 80


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> CiterConfig:
    """Read a configuration.

    Args:
        path: a YAML file. A section that is present but empty takes its defaults.
        overrides: `section.key=value`; the value is parsed as YAML, so `null`, `[1, 2]` and `{count: 2}`
            work, and a whole section replaces the file's. Later ones win.

    Raises:
        ConfigError: the file is missing or no mapping, an override is malformed, a key is unknown, or a value
            is not allowed. The message has one line for each problem.
    """
    path = Path(path)
    values = _read_mapping(path)
    overridden = [_apply_override(values, override) for override in overrides]
    schema = config_schema()
    _drop_empty_sections(values, schema, ())
    try:
        return CiterConfig.model_validate(values)
    except ValidationError as error:
        lines = _problem_lines(error.errors(include_url=False), schema, overridden)
    count = f"{len(lines)} problem{'s' if len(lines) > 1 else ''}"
    raise ConfigError("\n  ".join([f"configuration {path}: {count}", *lines]))


def dump_yaml(config: CiterConfig) -> str:
    """The complete configuration as YAML; loading it gives an equal configuration."""
    return _dumped(config.model_dump(mode="json"))


def _dumped(values: Any) -> str:
    readable = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=110)
    if yaml.safe_load(readable) == values:
        return readable
    # PyYAML breaks strings with Unicode line ends (U+0085, U+2028) unless it escapes all that is not ASCII.
    return yaml.safe_dump(values, sort_keys=False, width=110)


def write_run_yaml(config: CiterConfig, output_dir: str | Path) -> Path:
    """Write `run.yaml`, from which the run can be reproduced, into the output folder; without passwords in URLs."""
    header = "# The complete configuration of this run, defaults and overrides included. To run it again:\n"
    header += "#   citer COMMAND --config run.yaml\n"
    values = config.model_dump(mode="json")
    shown = redact_values(values)
    if shown != values:
        header += f"# Passwords in URLs are left out ({MASK}); give those keys again, or better, use the environment.\n"
    path = storage_path(output_dir) / RUN_YAML
    with replacing(path) as temporary:
        temporary.write_text(header + _dumped(shown), encoding="utf-8")
    return path


def config_digest(config: CiterConfig, sections: Iterable[str], *, exclude: Collection[str] = ()) -> str:
    """SHA-256 (hex) of the canonical JSON of some sections, independent of their order.

    Args:
        config: the configuration.
        sections: dotted paths of sections or single keys, such as `prompt` or `collect.max_new_tokens`.
        exclude: dotted paths that do not count, such as `collect.rollouts`.

    Raises:
        ConfigError: a path is not in the configuration.
    """
    values = config.model_dump(mode="json")
    for path in exclude:
        parent = _value_at(values, path.split(".")[:-1], path)
        _value_at(values, path.split("."), path)
        del parent[path.rpartition(".")[2]]
    chosen = {path: _value_at(values, path.split("."), path) for path in sections}
    canonical = json.dumps(chosen, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML's safe loader, except that a key given twice is an error; the second would silently win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _parse_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506 (a subclass of SafeLoader)


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        values = _parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"configuration {path} does not exist; give a YAML file such as one in configs/") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"configuration {path} is not valid YAML: {_yaml_problem(error)}") from None
    if values is None:
        raise ConfigError(f"configuration {path} is empty; it must hold at least name, output_dir, pair and data")
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise ConfigError(f"configuration {path} must be a mapping of sections, not a {kind}")
    return values


def _yaml_problem(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())


def _apply_override(values: dict[str, Any], override: str) -> str:
    """Set one `section.key=value` in place, and return its dotted key."""
    key, equals, text = override.partition("=")
    key = key.strip()
    parts = key.split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {override!r} is malformed; write section.key=value, such as iterate.max_rounds=2")
    try:
        value = _parse_yaml(text)
    except yaml.YAMLError as error:
        problem = _yaml_problem(error)
        raise ConfigError(f"override {override!r}: the value is not valid YAML ({problem}); quote it") from None
    node = values
    for depth, part in enumerate(parts[:-1], start=1):
        child = node.get(part)
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            where = ".".join(parts[:depth])
            raise ConfigError(f"override {override!r}: {where} is a value ({child!r}), not a section")
        node = child
    node[parts[-1]] = value
    return key


def _drop_empty_sections(values: dict[str, Any], schema: ConfigSchema, path: tuple[str, ...]) -> None:
    """Remove sections given as null (a heading whose keys are all commented out), so that defaults apply."""
    for name, value in list(values.items()):
        here = (*path, str(name))
        key = schema.key_at(here)
        if key is None or key.section is None:
            continue
        if value is None and not key.required:
            del values[name]
        elif isinstance(value, dict):
            _drop_empty_sections(value, schema, here)


def _problem_lines(errors: Sequence[ErrorDetails], schema: ConfigSchema, overridden: Sequence[str]) -> list[str]:
    """One line for each key in trouble; the alternatives of a union are one problem."""
    lines: dict[str, str] = {}
    for error in errors:
        path = _key_path(error["loc"], schema)
        dotted = ".".join(path)
        if dotted in lines and error["type"] != "value_error":
            continue
        origin = " (given as an override)" if _is_overridden(dotted, overridden) else ""
        lines[dotted] = f"{dotted}{origin}: {_explain(error, path, schema)}"
    return list(lines.values())


def _is_overridden(dotted: str, overridden: Sequence[str]) -> bool:
    return any(dotted == key or dotted.startswith(f"{key}.") for key in overridden)


def _key_path(location: tuple[int | str, ...], schema: ConfigSchema) -> tuple[str, ...]:
    """The dotted path of an error's location: list indexes are kept, the tags of unions are not keys."""
    path: list[str] = []
    for part in location:
        inside = schema.section_at(path) is not None
        if inside or isinstance(part, int):
            path.append(str(part))
    return tuple(path)


def _explain(error: ErrorDetails, path: tuple[str, ...], schema: ConfigSchema) -> str:
    if error["type"] == "extra_forbidden":
        return _explain_unknown(path, schema)
    if error["type"] == "value_error":
        return error["msg"].removeprefix("Value error, ")
    while path and path[-1].isdigit():  # an element of a list: the list's own type says what is allowed
        path = path[:-1]
    key = schema.key_at(path)
    allowed = key.type_text if key else "a mapping of sections"
    if error["type"] == "missing":
        return f"missing; allowed: {allowed} ({key.description if key else ''})"
    given = error["input"]
    hint = ""
    if error["type"] == "string_type" and not isinstance(given, dict | list) and given is not None:
        hint = "; put it in quotes to make it a string"
    return f"{_shown(given)} is not allowed; allowed: {allowed}{hint}"


def _explain_unknown(path: tuple[str, ...], schema: ConfigSchema) -> str:
    *parent, name = path
    section = schema.section_at(parent)
    known = [key.name for key in schema.keys(section)] if section else []
    suggestion = difflib.get_close_matches(name, known, n=1)
    if not suggestion:  # the right key in the wrong section
        suggestion = [".".join(other) for other in schema.walk() if other[-1] == name][:1]
    hint = f"; did you mean {suggestion[0]}?" if suggestion else "."
    return f"unknown key{hint} Allowed in {'.'.join(parent) or 'the top level'}: {', '.join(known)}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_VALUE_LENGTH else f"{text[:_SHOWN_VALUE_LENGTH]}..."


def _value_at(values: Any, path: Sequence[str], dotted: str) -> Any:
    for part in path:
        if not isinstance(values, dict) or part not in values:
            raise ConfigError(f"no section or key {dotted!r} in the configuration")
        values = values[part]
    return values
