"""What SECURITY.md promises about the code, checked in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from citer_ray.config import CiterConfig, ModelConfig
from citer_ray.config_serve import ServeConfig

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "citer_ray").rglob("*.py"), *(ROOT / "jobs").glob("*.py"), *(ROOT / "infra").rglob("*.py")])
UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "torch.save", "os.system", "yaml.unsafe_load", "yaml.full_load"}
UNSAFE_ARGUMENTS = (("shell", "True"), ("verify", "False"), ("allow_pickle", "True"))


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a call's function; empty for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id])) if isinstance(node, ast.Name) else ""


def calls(tree: ast.AST) -> Iterator[tuple[str, dict[str | None, str]]]:
    """Calls with their dotted names and keyword arguments as text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield dotted(node.func), {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}


def problems(source: str) -> list[str]:
    """What a file does that could run code from outside."""
    tree, found = ast.parse(source), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in UNSAFE_MODULES:
            found.append(str(node.module))
    for name, given in calls(tree):
        if name in UNSAFE_CALLS or (name == "yaml.load" and given != {"Loader": "_UniqueKeyLoader"}):
            found.append(name)  # that loader is our subclass of the safe one
        found += [f"{name}({key}={given[key]})" for key, value in UNSAFE_ARGUMENTS if given.get(key) == value]
        trust = given.get("trust_remote_code")
        if trust is not None and not trust.endswith(".trust_remote_code"):  # as configured, never decided on the way
            found.append(f"{name}(trust_remote_code={trust})")
    return found


def test_no_code_from_outside() -> None:
    assert len(SOURCES) > 100
    assert {str(path): found for path in SOURCES if (found := problems(path.read_text("utf-8")))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "torch.load(path)",
        "yaml.load(text, Loader=yaml.Loader)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(command, shell=True)",
        "AutoConfig.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_each_of_them_would_be_found(source: str) -> None:
    assert problems(source)


def test_what_is_off_and_closed_by_default() -> None:
    assert ModelConfig(path="x").trust_remote_code is False
    serve = ServeConfig()
    assert (serve.host, serve.allow_origins) == ("127.0.0.1", ())
    values = str(CiterConfig.model_json_schema())
    assert not re.search(r"'(api_key|password|secret|\w*_token_value)':", values)  # secrets have no key


def test_ray_starts_here_without_a_dashboard() -> None:
    starts = []
    for path in SOURCES:
        for name, given in calls(ast.parse(path.read_text("utf-8"))):
            if name == "ray.init" and given.get("address") == "'local'":
                starts.append(given)
    assert [start["include_dashboard"] for start in starts] == ["False"]
    settings = "\n".join(path.read_text("utf-8") for path in SOURCES) + (ROOT / "Makefile").read_text("utf-8")
    assert not re.search(r"RAY_AUTH_MODE\W+disabled", settings)


@pytest.mark.parametrize("file", ["Makefile", "README.md", "docs/tracking.md", "docs/cluster.md", "docs/serving.md"])
def test_commands_that_people_copy_stay_on_this_machine(file: str) -> None:
    text = (ROOT / file).read_text("utf-8")
    assert not re.search(r"--host[= ]0\.0\.0\.0|--dashboard-host[= ]0\.0\.0\.0|serve\.host=0\.0\.0\.0", text)
