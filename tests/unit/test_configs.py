"""Every file in `configs/` loads, validates, and comes back from its own dump."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from citer_ray.config import CiterConfig
from citer_ray.config_loading import dump_yaml, load_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def test_the_promised_configurations_are_there() -> None:
    promised = {"embedded", "smoke", "qwen2-1.5b-72b", "llama3.1-8b-70b", "qwen3-0.6b-32b", "smollm2-135m-1.7b"}
    assert promised <= {path.stem for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configuration_loads(path: Path) -> None:
    config = load_config(path, [])
    assert CiterConfig.model_validate(yaml.safe_load(dump_yaml(config))) == config
    assert config.data.test is not None
