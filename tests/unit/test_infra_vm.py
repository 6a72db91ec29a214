"""The cluster launcher's files, by the schema and the defaults of Ray itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "infra" / "vm").glob("*.yaml"))


def prepared(path: Path) -> dict[str, Any]:
    """What `ray up` makes of a file before it asks a provider."""
    config = prepare_config(yaml.safe_load(path.read_text("utf-8")))
    validate_config(config)
    return config


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_cluster(path: Path) -> None:
    config = prepared(path)
    start = {role: " ".join(config[f"{role}_start_ray_commands"]) for role in ("head", "worker")}
    assert "--head" in start["head"] and "--dashboard-host=127.0.0.1" in start["head"]
    assert "--address=$RAY_HEAD_IP:6379" in start["worker"]
    for commands in start.values():
        assert "RAY_AUTH_MODE=token" in commands and "RAY_SERVE_USE_GRPC_BY_DEFAULT=1" in commands
    setup = [*config["setup_commands"], *config["head_setup_commands"], *config["worker_setup_commands"]]
    assert any("infra/setup.sh" in command for command in setup)
    assert all((ROOT / source).exists() for source in config["file_mounts"].values() if not source.startswith("~"))
    assert {".git", ".venv", "runs"} <= set(config["rsync_exclude"])


def test_machines_of_ones_own() -> None:
    config = prepared(ROOT / "infra" / "vm" / "cluster.yaml")
    (node_type,) = config["available_node_types"].values()
    assert node_type["max_workers"] == len(config["provider"]["worker_ips"])


def test_machines_of_a_cloud() -> None:
    config = prepared(ROOT / "infra" / "vm" / "cluster-aws.yaml")
    types = config["available_node_types"]
    assert types[config["head_node_type"]]["resources"] == {"CPU": 0}
    assert types["gpu"]["resources"]["GPU"] == 8
    assert sum(kind["max_workers"] for kind in types.values()) <= config["max_workers"]
    ports = {rule["ToPort"] for rule in config["provider"]["security_group"]["IpPermissions"]}
    assert ports == {22}  # nothing of Ray's is open to the outside


def test_a_mistake_is_found(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text(FILES[-1].read_text("utf-8") + "\nworker_start_comands: []\n", "utf-8")
    with pytest.raises(Exception, match="worker_start_comands"):
        prepared(broken)
