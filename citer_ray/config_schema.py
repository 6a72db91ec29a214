"""The configuration's schema in words: which keys there are, of what type, with what default.

Fed by the pydantic models of `config.py` through their JSON schema; read by `config_loading` (error messages)
and by `config_docs` (the reference page), so that both name types in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from citer_ray.config import CiterConfig

_TYPE_WORDS = {
    "string": "string",
    "integer": "integer",
    "number": "number",
    "boolean": "true or false",
    "null": "null",
}
_BOUNDS = (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a section.

    Attributes:
        name: the key inside its section.
        type_text: allowed values in words, such as `integer >= 1, or null`.
        required: whether a configuration must give it.
        default: JSON text of the default; empty for a required key or a subsection.
        description: what the key means.
        section: name of the schema definition if the key is a subsection, else None.
    """

    name: str
    type_text: str
    required: bool
    default: str
    description: str
    section: str | None


@dataclass(frozen=True, slots=True)
class ConfigSchema:
    """The whole schema: the top level and the definitions of sections."""

    root: dict[str, Any]

    def definition(self, name: str) -> dict[str, Any]:
        """The JSON schema of one section's definition."""
        definition: dict[str, Any] = self.root["$defs"][name]
        return definition

    def keys(self, section: dict[str, Any] | None = None) -> list[Key]:
        """The keys of a section (of the top level if None), in the order of the model."""
        node = self.root if section is None else section
        required = set(node.get("required", ()))
        return [self._key(name, field, name in required) for name, field in node["properties"].items()]

    def section_at(self, path: Sequence[str]) -> dict[str, Any] | None:
        """The section at a dotted path, or None where the path leads to a value or nowhere."""
        node: dict[str, Any] | None = self.root
        for part in path:
            field = node["properties"].get(part) if node else None
            name = _section_name(field) if field else None
            node = self.definition(name) if name else None
        return node

    def key_at(self, path: Sequence[str]) -> Key | None:
        """The key at a dotted path, or None."""
        section = self.section_at(path[:-1])
        if section is None or not path:
            return None
        return next((key for key in self.keys(section) if key.name == path[-1]), None)

    def walk(self, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
        """Paths of all keys, sections included, depth first."""
        section = self.section_at(path)
        for key in self.keys(section) if section else ():
            yield (*path, key.name)
            yield from self.walk((*path, key.name))

    def _key(self, name: str, field: dict[str, Any], required: bool) -> Key:
        section = _section_name(field)
        # A description equal to the section's own is left out of the JSON schema.
        described = field if "description" in field or section is None else self.definition(section)
        default = "" if required or section else json.dumps(field.get("default"), ensure_ascii=False)
        return Key(name, _type_text(field), required, default, described.get("description", ""), section)


def config_schema() -> ConfigSchema:
    """The schema of `CiterConfig`."""
    return ConfigSchema(CiterConfig.model_json_schema())


def _section_name(field: dict[str, Any]) -> str | None:
    reference = field.get("$ref")
    return str(reference).rsplit("/", 1)[-1] if reference else None


def _type_text(field: dict[str, Any]) -> str:
    if "$ref" in field:
        return "section"
    if "anyOf" in field:
        return ", or ".join(_type_text(option) for option in field["anyOf"])
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if field.get("type") == "array":
        word, _, bounds = _type_text(field.get("items", {})).partition(" ")
        return f"list of {word}s {bounds}".rstrip()
    if field.get("type") == "object":
        return f"names, each with a {_type_text(field.get('additionalProperties', {}))}"
    words = _TYPE_WORDS.get(field.get("type", ""), "any value")
    bounds = " and ".join(f"{sign} {field[bound]:g}" for bound, sign in _BOUNDS if bound in field)
    pattern = f"matching `{field['pattern']}`" if "pattern" in field else ""
    return " ".join(part for part in (words, bounds, pattern) if part)
