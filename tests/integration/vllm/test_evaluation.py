"""An evaluation whose LLM runs on vLLM measures what one with the transformers engine measures."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from citer_ray.config import CiterConfig
from citer_ray.config_loading import load_config
from citer_ray.evaluation import Setting
from citer_ray.on_ray.evaluation_worker import EvaluationWorker, Routers
from citer_ray.policy import AlwaysLlm, AlwaysSlm, random_policy
from citer_ray.preparation import engine_spec, examples_to_json, load_purpose, prepare

pytestmark = pytest.mark.vllm
SMOKE = Path(__file__).parents[3] / "configs" / "smoke.yaml"
SETTINGS = [
    Setting("slm", None, AlwaysSlm()),
    Setting("llm", None, AlwaysLlm()),
    Setting("random", 0.3, random_policy(0.3, 0)),
]
# What is written, and by whom; other columns are of time.
COLUMNS = ("setting", "example_id", "correct", "tokens", "llm_tokens", "visits", "response_crc")


def measured(config: CiterConfig) -> pa.Table:
    prepared = prepare(config)
    worker = EvaluationWorker(engine_spec(prepared))
    examples = load_purpose(prepared, "test").examples[:12]
    table = worker.measure(Routers({}, prepared.fingerprint.slm), SETTINGS, examples_to_json(examples))
    worker.close()
    return table.select(COLUMNS)


def test_an_llm_on_vllm_gives_the_same_rows(tmp_path: Path) -> None:
    common = ["tracking.enabled=false", "evaluate.max_new_tokens=60"]
    vllm = ["engine.kind=vllm", "engine.llm.enforce_eager=true", "engine.llm.kv_cache_gib=0.125", "engine.max_rows=32"]
    ours = measured(load_config(SMOKE, [f"output_dir={tmp_path / 'vllm'}", *common, *vllm]))
    theirs = measured(load_config(SMOKE, [f"output_dir={tmp_path / 'transformers'}", *common]))
    assert ours.num_rows == 36
    assert ours.equals(theirs)
