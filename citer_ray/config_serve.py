"""The configuration section `serve`: the three deployments, limits, faults, and routers in service.

Read by `serving/` and `on_ray/serve_*.py`. Its defaults suit one machine; numbers of replicas and resources are what
a cluster changes.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from citer_ray.config_section import Fraction, Positive, Seconds, Section


class DeploymentConfig(Section):
    """Replicas of one deployment, and how their number follows the load."""

    min_replicas: int = Field(1, ge=0, description="Replicas at least; 0 (the LLM only) scales to zero.")
    max_replicas: Positive = Field(1, description="Replicas at most; equal to `min_replicas` turns autoscaling off.")
    initial_replicas: int | None = Field(None, ge=0, description="Replicas at the start; null takes `min_replicas`.")
    target_ongoing: float = Field(
        16.0,
        gt=0,
        description="Calls in progress in one replica that autoscaling aims at: requests of the ingress, responses of "
        "the SLM, visits of the LLM.",
    )
    max_ongoing: Positive = Field(256, description="Calls in progress in one replica at most; more wait.")
    upscale_delay_s: float = Field(10.0, ge=0, description="Seconds of more load before replicas are added.")
    downscale_delay_s: float = Field(60.0, ge=0, description="Seconds of less load before replicas go.")
    num_cpus: float = Field(1.0, ge=0, description="CPUs of one replica.")
    num_gpus: float = Field(
        0.0, ge=0, description="GPUs of one replica: a fraction shares one, a whole number is for tensor parallelism."
    )
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {}, description="Custom resources of one replica, such as `{slm: 1}`: it runs on nodes that have them."
    )
    health_check_period_s: Seconds = Field(5.0, description="Seconds between health checks.")
    health_check_timeout_s: Seconds = Field(10.0, description="Seconds after which a check has failed.")

    @model_validator(mode="after")
    def _ordered(self) -> DeploymentConfig:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas {self.min_replicas} is above max_replicas {self.max_replicas}")
        if self.initial_replicas is not None and not self.min_replicas <= self.initial_replicas <= self.max_replicas:
            raise ValueError(f"initial_replicas {self.initial_replicas} is not between min_replicas and max_replicas")
        return self


class ServeConfig(Section):
    """Serving over HTTP with Ray Serve."""

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 opens it to the network.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on.")
    proxy_location: Literal["EveryNode", "HeadOnly"] = Field(
        "EveryNode",
        description="Nodes that take requests: all with replicas, or the head alone. A stream ends with the node that "
        "took its request.",
    )
    engine: Literal["auto", "transformers", "vllm"] = Field(
        "auto",
        description="Engine of the replicas; `auto` takes vLLM where it is installed and the SLM's replicas have GPUs, "
        "and `engine.kind` otherwise.",
    )
    router: str | None = Field(
        None,
        description="Router in service: a folder that all nodes see, its URI, or `models:/NAME@champion`; null: none.",
    )
    canary_router: str | None = Field(None, description="Candidate router that gets `canary_fraction` of the requests.")
    canary_fraction: Fraction = Field(0.0, description="Part of routed requests that the candidate serves.")
    router_poll_s: Seconds | None = Field(
        30.0, description="Seconds between looks at whether another router is behind the name; null never looks."
    )
    threshold: float | None = Field(
        None, ge=0, description="Threshold of requests that name none; null takes the router's own."
    )
    llm_tokens_per_visit: Positive = Field(1, description="Tokens that the LLM writes in one visit.")
    default_max_tokens: Positive = Field(512, description="Limit of a response whose request names none, in tokens.")
    stream_interval_ms: float = Field(
        40.0, gt=0, description="A stream's chunk gathers the tokens of about this time; the first holds one token."
    )
    direct_turns: bool = Field(
        True,
        description="Visits after a response's first go straight to the replica that holds its KV cache (gRPC between "
        "the replicas, a port that the system chooses); false sends all of them through Serve.",
    )
    on_llm_unavailable: Literal["error", "slm"] = Field(
        "error", description="Without the LLM: end the response with an error, or let the SLM write the rest."
    )
    llm_unavailable_after_s: Seconds = Field(
        60.0, description="Seconds without any replica of the LLM that answers before it counts as unavailable."
    )
    turn_timeout_s: Seconds = Field(20.0, description="Seconds after which a turn is taken to another replica.")
    max_attempts: Positive = Field(4, description="Replicas of the SLM that a response tries before it fails.")
    deadline_s: Seconds = Field(
        600.0, description="Seconds that a response may take; requests ask for less with `x-deadline-seconds`."
    )
    drain_s: Seconds = Field(30.0, description="Seconds that running responses get when replicas are taken away.")
    session_idle_s: Seconds = Field(120.0, description="Seconds after which a session without a turn is closed.")
    max_body_bytes: Positive = Field(1_000_000, description="Larger bodies are refused with 413.")
    max_choices: Positive = Field(16, description="Largest `n`, and number of prompts of one request.")
    max_queued: int = Field(
        256, ge=-1, description="Requests that wait for a replica of the ingress, beyond `max_ongoing`; -1: no limit."
    )
    overload_status: Literal[429, 503] = Field(503, description="Status of requests beyond `max_queued`.")
    retry_after_s: Seconds = Field(1.0, description="`Retry-After` of refused requests, in seconds.")
    api_keys_env: str = Field(
        "CITER_API_KEYS", description="Environment variable with the accepted bearer keys, separated by commas."
    )
    allow_origins: tuple[str, ...] = Field((), description="Origins that browsers may call from (CORS).")
    ingress: DeploymentConfig = Field(
        DeploymentConfig(num_cpus=0.5, target_ongoing=64, max_ongoing=256), description="Replicas of the ingress."
    )
    slm: DeploymentConfig = Field(DeploymentConfig(num_cpus=0.5), description="Replicas of the SLM.")
    llm: DeploymentConfig = Field(DeploymentConfig(num_cpus=0.5), description="Replicas of the LLM.")

    @model_validator(mode="after")
    def _consistent(self) -> ServeConfig:
        for name in ("ingress", "slm"):
            if getattr(self, name).min_replicas < 1:
                raise ValueError(f"{name}.min_replicas must be at least 1; only the LLM scales to zero")
        if self.canary_router is not None and self.router is None:
            raise ValueError("canary_router needs a router beside it; set router")
        if self.canary_fraction > 0 and self.canary_router is None:
            raise ValueError("canary_fraction is above 0, but there is no canary_router")
        return self
