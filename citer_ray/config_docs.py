"""Generates docs/configuration.md from the schema: `python -m citer_ray.config_docs [PATH]`.

Fed by `config_schema`; a unit test keeps the committed page equal to what this module renders.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from citer_ray.config_schema import ConfigSchema, Key, config_schema
from citer_ray.file_replacement import replacing

DEFAULT_PATH = Path("docs/configuration.md")

_INTRODUCTION = """\
# Configuration

<!-- Generated from citer_ray/config.py by `python -m citer_ray.config_docs`; do not edit by hand. -->

A run is described by one YAML file. Every key can be overridden on the command line, and the value is read
as YAML:

    citer iterate --config configs/embedded.yaml iterate.max_rounds=2 collect.thresholds='[0.9, 0.97]'

An override wins over the file, and the file over the default. Unknown keys are refused. A value that YAML
would read as something else than text (`prompt.math={question}`, `name=2024`) needs quotes inside the
shell's: `name='"2024"'`. `--print-config` shows the result without running anything, and each run leaves it
as `run.yaml` in its output folder; `--config run.yaml` runs it again.

Two environment variables stand in for keys that are null: `MLFLOW_TRACKING_URI` for `tracking.uri` and
`RAY_ADDRESS` for `ray.address`. Keep passwords out of the file: MLflow reads `MLFLOW_TRACKING_USERNAME`,
`MLFLOW_TRACKING_PASSWORD` and `MLFLOW_TRACKING_TOKEN` from the environment.
"""


def render() -> str:
    """The page as Markdown."""
    schema = config_schema()
    top = schema.keys()
    parts = [_INTRODUCTION, "## Top level\n", _table([key for key in top if key.section is None])]
    shared: dict[str, list[str]] = {}
    for key in top:
        if key.section is None:
            continue
        definition = schema.definition(key.section)
        keys = schema.keys(definition)
        for inner in keys:
            if inner.section is not None:
                shared.setdefault(inner.section, []).append(f"{key.name}.{inner.name}")
        parts += [f"## `{key.name}`\n", f"{definition['description']}\n", _table(keys)]
    parts += [_shared_section(schema, name, paths) for name, paths in shared.items()]
    return "\n".join(parts)


def write(path: Path = DEFAULT_PATH) -> Path:
    """Write the page."""
    with replacing(path) as temporary:
        temporary.write_text(render(), encoding="utf-8")
    return path


def _shared_section(schema: ConfigSchema, name: str, paths: Sequence[str]) -> str:
    definition = schema.definition(name)
    heading = ", ".join(f"`{path}`" for path in paths)
    return "\n".join([f"## {heading}\n", f"{definition['description']}\n", _table(schema.keys(definition))])


def _table(keys: Sequence[Key]) -> str:
    rows = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for key in keys:
        default = "required" if key.required else "see below" if key.section else f"`{_cell(key.default)}`"
        rows.append(f"| `{key.name}` | {_cell(key.type_text)} | {default} | {_cell(key.description)} |")
    return "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_PATH)
