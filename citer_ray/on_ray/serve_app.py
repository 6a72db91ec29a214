"""The Serve application: three deployments from a configuration, for `citer serve`, `serve run` and Serve config files.

serve run citer_ray.on_ray.serve_app:app config=configs/embedded.yaml router=runs/embedded/routers/round-2

In a Serve config file (`infra/kuberay/rayservice.yaml` holds one) the same arguments are `args`, and `overrides` is a
list of `section.key=value`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, ValidationError
from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, BackpressureConfig, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from citer_ray.config import CiterConfig
from citer_ray.config_loading import load_config
from citer_ray.config_serve import DeploymentConfig
from citer_ray.errors import ConfigError
from citer_ray.on_ray.serve_autoscaling import replicas_for_turns
from citer_ray.on_ray.serve_environment import REPLICA
from citer_ray.on_ray.serve_ingress import RoutingIngress
from citer_ray.on_ray.serve_models import LlmReplica, SlmReplica
from citer_ray.on_ray.serve_routers import router_source
from citer_ray.on_ray.serve_routing import ROUTER_CLASS
from citer_ray.preparation import engine_spec, prepare

APP_NAME = "citer"


class AppArguments(BaseModel):
    """Arguments of `app`."""

    model_config = ConfigDict(extra="forbid")

    config: str
    router: str | None = None
    overrides: list[str] = []


def app(arguments: dict[str, Any]) -> Application:
    """The application that a configuration file describes; `serve run` and Serve config files call it.

    Serve builds a model from the arguments only where the annotation is a class at run time, so they are checked here.

    Raises:
        ConfigError: an argument is unknown, missing or of the wrong type, or the configuration is wrong.
    """
    return build_application(load_app_config(arguments))


def load_app_config(arguments: dict[str, Any]) -> CiterConfig:
    """The configuration that `app` serves.

    Raises:
        ConfigError: see `app`.
    """
    try:
        given = AppArguments.model_validate(arguments)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in error.errors()]
        allowed = ", ".join(AppArguments.model_fields)
        raise ConfigError(f"arguments of the Serve application ({allowed}): {'; '.join(problems)}") from None
    overrides = list(given.overrides)
    if given.router is not None:
        overrides.append(f"serve.router={given.router}")
    return load_config(given.config, overrides)


def build_application(config: CiterConfig) -> Application:
    """The deployments, bound together.

    Raises:
        ConfigError, PairError, DataError: the pair or a router cannot be used; found before any model loads.
    """
    config = with_serving_engine(config)
    prepared = prepare(config)
    spec = engine_spec(prepared)
    source = router_source(config, spec.slm_fingerprint)
    routers = source.load()
    serving, kind = config.serve, config.engine.kind
    if kind == "vllm" and serving.canary_router is not None:
        raise ConfigError("a vLLM engine runs one router: serve.canary_router needs serve.engine: transformers")
    fixed = routers.current.ref if kind == "vllm" and routers.current else None
    llm = _deployment(LlmReplica, name="LLM", **_llm_options(config)).bind(spec)
    slm = _deployment(SlmReplica, name="SLM", **_options(serving.slm, config, sticky=True)).bind(spec, llm, fixed)
    ingress = _deployment(
        serve.ingress()(RoutingIngress),
        name="RoutingIngress",
        max_queued_requests=serving.max_queued,
        backpressure_config=BackpressureConfig(
            status_code=serving.overload_status, retry_after_s=serving.retry_after_s
        ),
        user_config={},
        **_options(serving.ingress, config, sticky=False),
    )
    return ingress.bind(spec, slm, llm, source)


def with_serving_engine(config: CiterConfig) -> CiterConfig:
    """The configuration with the engine that serves as its engine (`serve.engine`).

    What the replicas reserve decides, not what this machine has: a cluster's head often has neither GPU nor work.
    """
    kind = config.serve.engine
    if kind == "auto":
        takes_vllm = config.serve.slm.num_gpus > 0 and find_spec("vllm") is not None
        kind = "vllm" if takes_vllm else config.engine.kind
    return config.model_copy(update={"engine": config.engine.model_copy(update={"kind": kind})})


def _deployment(cls: Any, **options: Any) -> Deployment:
    return cast(Deployment, serve.deployment(cls)).options(**options)


def _options(deployment: DeploymentConfig, config: CiterConfig, *, sticky: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_ongoing_requests": min(deployment.max_ongoing, config.engine.max_rows)
        if sticky
        else deployment.max_ongoing,
        "graceful_shutdown_timeout_s": config.serve.drain_s,
        "graceful_shutdown_wait_loop_s": min(1.0, config.serve.drain_s),
        "health_check_period_s": deployment.health_check_period_s,
        "health_check_timeout_s": deployment.health_check_timeout_s,
        # One record a request comes from the ingress; Serve's own would be one a turn.
        "logging_config": LoggingConfig(encoding="JSON", enable_access_log=False),
    } | _resources(deployment)
    if sticky:
        options["request_router_config"] = RequestRouterConfig.model_validate({"request_router_class": ROUTER_CLASS})
    if deployment.min_replicas == deployment.max_replicas:
        return options | {"num_replicas": deployment.max_replicas}
    return options | {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=deployment.min_replicas,
            max_replicas=deployment.max_replicas,
            initial_replicas=deployment.initial_replicas,
            target_ongoing_requests=deployment.target_ongoing,
            upscale_delay_s=deployment.upscale_delay_s,
            downscale_delay_s=deployment.downscale_delay_s,
            metrics_interval_s=min(2.0, max(0.1, deployment.upscale_delay_s / 2)),
            look_back_period_s=max(1.0, min(10.0, deployment.upscale_delay_s)),
        )
    }


def _llm_options(config: CiterConfig) -> dict[str, Any]:
    """The LLM's replicas also do turns that Serve does not count."""
    options = _options(config.serve.llm, config, sticky=True)
    if "autoscaling_config" in options and config.serve.direct_turns:
        policy = AutoscalingPolicy(policy_function=replicas_for_turns)
        options["autoscaling_config"] = options["autoscaling_config"].model_copy(update={"policy": policy})
    return options


def _resources(deployment: DeploymentConfig) -> dict[str, Any]:
    """What a replica reserves; a fraction of a GPU is shared, several are whole."""
    gpus = deployment.num_gpus
    if gpus > 1 and gpus != round(gpus):
        raise ConfigError(f"num_gpus {gpus:g} of a replica must be a fraction up to 1, or a whole number")
    options = {
        "num_cpus": deployment.num_cpus,
        "num_gpus": gpus,
        "resources": dict(deployment.resources),
        "runtime_env": {"env_vars": REPLICA},
    }
    return {"ray_actor_options": options}
