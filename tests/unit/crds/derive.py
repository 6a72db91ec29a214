"""Derive the small JSON schemas beside this file from the published ones; run by hand when a version changes.

python tests/unit/crds/derive.py KUBERAY_CHECKOUT COMPOSE_SPEC_CHECKOUT

KUBERAY_CHECKOUT holds `helm-chart/kuberay-operator/crds/*.yaml`, COMPOSE_SPEC_CHECKOUT `schema/compose-spec.json`; the
README beside this file names the versions. Nothing is left out of what a manifest may hold: descriptions, the status
and the operator's own annotations go, unknown fields become errors (the API server would drop them without a word),
and a subschema that occurs more than once is stored once.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
KINDS = {"RayCluster": "rayclusters", "RayJob": "rayjobs", "RayService": "rayservices"}
KEPT = {
    "additionalProperties",
    "anyOf",
    "enum",
    "items",
    "maximum",
    "maxItems",
    "maxLength",
    "minimum",
    "minItems",
    "minLength",
    "pattern",
    "properties",
    "required",
    "type",
}
SHARED_FROM = 60  # characters; smaller subschemas are written where they stand


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """A CRD's OpenAPI schema as a JSON schema that refuses unknown fields."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    kept = {key: value for key, value in schema.items() if key in KEPT}
    if "properties" in kept:
        kept["properties"] = {name: strict(value) for name, value in kept["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            kept["additionalProperties"] = False
    elif isinstance(kept.get("additionalProperties"), dict):
        kept["additionalProperties"] = strict(kept["additionalProperties"])
    if "items" in kept:
        kept["items"] = strict(kept["items"])
    return kept


def shared(schemas: dict[str, Any]) -> dict[str, Any]:
    """The schemas with what they have in common under `$defs`."""
    counts: Counter[str] = Counter()

    def count(node: Any) -> None:
        if isinstance(node, dict):
            text = json.dumps(node, sort_keys=True)
            counts[text] += 1
            if counts[text] > 1:
                return
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            count(child)

    count(list(schemas.values()))
    definitions: dict[str, Any] = {}

    def stored(node: Any, is_schema: bool) -> Any:
        if isinstance(node, list):
            return node
        if not isinstance(node, dict):
            return node
        text = json.dumps(node, sort_keys=True)
        # The names under `properties` are no keywords: what stands there is a schema in any case.
        parts = {
            key: {name: stored(value, True) for name, value in child.items()}
            if is_schema and key == "properties"
            else stored(child, key in ("items", "additionalProperties"))
            for key, child in node.items()
        }
        if not is_schema or counts[text] < 2 or len(text) < SHARED_FROM:
            return parts
        name = hashlib.sha256(text.encode()).hexdigest()[:8]
        definitions[name] = parts
        return {"$ref": f"#/$defs/{name}"}

    kinds = {kind: stored(schema, True) for kind, schema in schemas.items()}
    return {"kinds": kinds, "$defs": dict(sorted(definitions.items()))}


def kuberay(checkout: Path) -> dict[str, Any]:
    """Schemas of the three kinds' version v1."""
    schemas = {}
    for kind, plural in KINDS.items():
        crd = yaml.safe_load((checkout / f"helm-chart/kuberay-operator/crds/ray.io_{plural}.yaml").read_text("utf-8"))
        version = next(version for version in crd["spec"]["versions"] if version["name"] == "v1")
        schema = strict(version["schema"]["openAPIV3Schema"])
        del schema["properties"]["status"]
        schema["properties"] |= {"apiVersion": {"enum": ["ray.io/v1"]}, "kind": {"enum": [kind]}}
        schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
        schemas[kind] = schema
    return shared(schemas)


def without_descriptions(node: Any) -> Any:
    """The same schema; `description` goes where it is a text, and stays where it is a property's name."""
    if isinstance(node, list):
        return [without_descriptions(child) for child in node]
    if not isinstance(node, dict):
        return node
    return {
        key: without_descriptions(value)
        for key, value in node.items()
        if not (key == "description" and isinstance(value, str))
    }


def write(name: str, schema: dict[str, Any]) -> None:
    """Write compact JSON with a line break at the end."""
    (HERE / name).write_text(json.dumps(schema, separators=(",", ":")) + "\n", "utf-8")


if __name__ == "__main__":
    write("kuberay-v1.json", kuberay(Path(sys.argv[1])))
    published = json.loads((Path(sys.argv[2]) / "schema" / "compose-spec.json").read_text("utf-8"))
    write("compose-spec.json", without_descriptions(published))
