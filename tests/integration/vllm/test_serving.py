"""vLLM engines behind Ray Serve: a routed response over HTTP holds the tokens of the loop in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.untrained_router import QUESTIONS
from citer_ray.engines.build import build_engine
from citer_ray.policy import Threshold
from citer_ray.preparation import engine_spec, prepare
from citer_ray.router_artifact import read_metadata
from tests.integration.serve.conftest import Reference, Server, served

pytestmark = [pytest.mark.ray, pytest.mark.vllm]
LENGTH = 40
SETTINGS = (
    "serve.engine=vllm",
    *(
        f"engine.{role}.{setting}"
        for role in ("slm", "llm")
        for setting in ("enforce_eager=true", "kv_cache_gib=0.125")
    ),
    "engine.max_rows=16",
    "serve.ingress={num_cpus: 0.1}",
    # The models' vLLM processes start inside: several minutes on a busy machine.
    "serve.slm={num_cpus: 0.5, health_check_timeout_s: 600}",
    "serve.llm={num_cpus: 0.5, health_check_timeout_s: 600}",
    "serve.turn_timeout_s=60",
)


@pytest.fixture(scope="module")
def vllm_server(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(tmp_path_factory.mktemp("serving"), SETTINGS) as started:
        yield started


def test_a_routed_response_is_that_of_one_process(vllm_server: Server) -> None:
    prepared = prepare(vllm_server.config)
    spec = engine_spec(prepared)
    reference = Reference(prepared, build_engine("slm", spec, router=vllm_server.router), build_engine("llm", spec))
    threshold = read_metadata(vllm_server.router).calibration.threshold_for(0.2)
    expected = reference.decode(QUESTIONS[0], Threshold("router", threshold), LENGTH)
    assert expected.visits > 0
    stream = vllm_server.openai().chat.completions.create(
        model="routed",
        messages=[{"role": "user", "content": QUESTIONS[0]}],
        temperature=0,
        max_tokens=LENGTH,
        stream=True,
        extra_body={"llm_share": 0.2, "citer": {"trace": True}},
    )
    tokens = [token for chunk in stream if chunk.choices for token in chunk.choices[0].model_extra["citer"]["tokens"]]
    assert [token["id"] for token in tokens] == expected.token_ids
    assert [token["writer"] for token in tokens] == [str(writer) for writer in expected.writers]
    vllm_server.wait_until_idle()
