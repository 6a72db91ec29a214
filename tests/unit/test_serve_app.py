"""What `serve run` and Serve config files hand to the application becomes a configuration, or a clear message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.serve import Application
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve._private.build_app import build_app

from citer_ray.config import CiterConfig
from citer_ray.config_loading import load_config
from citer_ray.errors import ConfigError
from citer_ray.on_ray import serve_app

EMBEDDED = str(Path(__file__).parents[2] / "configs" / "embedded.yaml")


def test_serve_calls_the_builder_with_a_plain_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's own function, so that a builder which expects something else fails here."""
    built: list[CiterConfig] = []

    def build(config: CiterConfig) -> Application:
        built.append(config)
        return Application.__new__(Application)

    monkeypatch.setattr(serve_app, "build_application", build)
    arguments = {"config": EMBEDDED, "router": "routers/best", "overrides": ["serve.llm.num_gpus=4"]}
    call_user_app_builder_with_args_if_necessary(serve_app.app, arguments)
    assert (built[0].serve.router, built[0].serve.llm.num_gpus) == ("routers/best", 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "config: Field required"),
        ({"config": EMBEDDED, "roter": "x"}, "roter: Extra inputs"),
        ({"config": EMBEDDED, "overrides": "serve.port=1"}, "overrides: Input should be a valid list"),
        ({"config": "nowhere.yaml"}, "nowhere.yaml does not exist"),
        ({"config": EMBEDDED, "overrides": ["serve.prt=1"]}, "did you mean port"),
    ],
)
def test_wrong_arguments_are_explained(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        serve_app.load_app_config(arguments)


@pytest.mark.parametrize(
    ("settings", "installed", "kind"),
    [
        ([], True, "transformers"),
        (["serve.slm.num_gpus=0.5"], True, "vllm"),
        (["serve.slm.num_gpus=0.5"], False, "transformers"),
        (["serve.slm.num_gpus=0.5", "serve.engine=transformers"], True, "transformers"),
        (["serve.engine=vllm"], True, "vllm"),
    ],
)
def test_replicas_with_gpus_take_vllm(
    settings: list[str], installed: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_app, "find_spec", lambda name: object() if installed else None)
    config = load_config(EMBEDDED, settings)
    assert serve_app.with_serving_engine(config).engine.kind == kind


def test_the_application_is_built_without_a_cluster(tmp_path: Path) -> None:
    """All of what Serve does before it starts replicas; the names are those that Serve configs may change."""
    arguments = {"config": EMBEDDED, "overrides": [f"output_dir={tmp_path}", "serve.slm={max_replicas: 3}"]}
    built = build_app(call_user_app_builder_with_args_if_necessary(serve_app.app, arguments), name=serve_app.APP_NAME)
    deployments = {deployment.name: deployment for deployment in built.deployments}
    assert set(deployments) == {"RoutingIngress", "SLM", "LLM"}
    assert built.ingress_deployment_name == "RoutingIngress"
    scaling = deployments["SLM"]._deployment_config.autoscaling_config
    assert scaling is not None and scaling.max_replicas == 3
