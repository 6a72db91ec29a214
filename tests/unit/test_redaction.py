"""Secrets stay out of everything that a run writes: files, params of MLflow, and logs."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from citer_ray.config import CiterConfig
from citer_ray.config_loading import load_config, write_run_yaml
from citer_ray.provenance import write_provenance
from citer_ray.redaction import RedactingFilter, redact, redact_argv, redact_values, without_credentials
from citer_ray.tracking import flatten_params


def config(**changes: Any) -> CiterConfig:
    return CiterConfig.model_validate(
        {
            "name": "demo",
            "output_dir": "runs/demo",
            "pair": {"slm": {"path": "a"}, "llm": {"path": "b"}},
            "data": {"collect": "c"},
        }
        | changes
    )


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("https://u:p@h/x", "https://***@h/x"),
        ("postgresql://u:p@h:5/x and http://t@h", "postgresql://***@h:5/x and http://***@h"),
        ("s3://AKIA7:hunter2@bucket/runs", "s3://***@bucket/runs"),
        ("s3://AKIA7:hun/ter+2@bucket/runs", "s3://***@bucket/runs"),
        ("https://u:p@ss@h", "https://***@h"),
        ("https://h/x?api_key=hunter2&n=1", "https://h/x?api_key=***&n=1"),
        ("https://h/x?X-Amz-Signature=ab12", "https://h/x?X-Amz-Signature=***"),
        ("https://h/x@y", "https://h/x@y"),
        ("http://localhost:5000/models/x@champion", "http://localhost:5000/models/x@champion"),
        ("models:/citer@champion", "models:/citer@champion"),
        ('{"a":"https://h","m":"x@y"}', '{"a":"https://h","m":"x@y"}'),
        ("ask a@b.org, see https://h", "ask a@b.org, see https://h"),
    ],
)
def test_credentials_in_urls(text: str, clean: str) -> None:
    assert without_credentials(text) == clean
    assert redact(text) == clean


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("tracking.password=hunter2", "tracking.password=***"),
        ("AWS_SECRET_ACCESS_KEY=hun/ter2 next", "AWS_SECRET_ACCESS_KEY=*** next"),
        ("--api-key=hunter2", "--api-key=***"),
        ("HF_TOKEN = 'hunter 2'", "HF_TOKEN = ***"),
        ("CITER_API_KEYS=one", "CITER_API_KEYS=***"),
        ("Authorization: Bearer hunter2hunter2", "Authorization: Bearer ***"),
        ("collect.max_new_tokens=256", "collect.max_new_tokens=256"),
        ("pair.handoff_token=<reponame>", "pair.handoff_token=<reponame>"),
        ("serve.api_keys_env=MY_KEYS", "serve.api_keys_env=MY_KEYS"),
        ("serve.llm_tokens_per_visit=4", "serve.llm_tokens_per_visit=4"),
        ("collect.thresholds=[0.9, 0.97]", "collect.thresholds=[0.9, 0.97]"),
    ],
)
def test_assignments(text: str, clean: str) -> None:
    assert redact(text) == clean


def test_the_argument_after_an_option() -> None:
    assert redact_argv(["fit", "--password", "hunter2", "--round", "2"]) == ["fit", "--password", "***", "--round", "2"]


def test_nested_values_keep_their_shape() -> None:
    values = {"a": [1, None, {"uri": "http://u:p@h"}], "token=x": True}
    assert redact_values(values) == {"a": [1, None, {"uri": "http://***@h"}], "token=x": True}


def test_nothing_that_a_run_writes_holds_a_secret(tmp_path: Path) -> None:
    """Every string of the configuration that may be a URL, and the command line that gave it."""
    uri = "https://me:hunter2@mlflow.example.org"
    loaded = config(
        data={"collect": "s3://AKIA7:hunter2@bucket/gsm8k.parquet"}, tracking={"uri": uri}, serve={"router": uri}
    )
    argv = ["citer", "iterate", f"tracking.uri={uri}", "--password", "hunter2", "extra.secret=hunter2"]
    run_yaml = write_run_yaml(loaded, tmp_path)
    write_provenance(tmp_path, loaded, argv, {"seed": 0})
    for path in tmp_path.iterdir():
        assert "hunter2" not in path.read_text("utf-8"), path.name
    assert "hunter2" not in json.dumps(flatten_params(loaded.model_dump(mode="json")))
    again = load_config(run_yaml)
    assert again.tracking.uri == "https://***@mlflow.example.org"
    assert "Passwords in URLs are left out" in run_yaml.read_text("utf-8")


def test_run_yaml_without_secrets_is_the_configuration(tmp_path: Path) -> None:
    plain = config(prompt={"math": "token=1 {question}", "chat": True})
    text = write_run_yaml(plain, tmp_path).read_text("utf-8")
    assert CiterConfig.model_validate(yaml.safe_load(text)) == plain
    assert "left out" not in text


def test_log_records_are_redacted() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(RedactingFilter())
    logger = logging.getLogger("test_redaction")
    logger.addHandler(handler)
    logger.propagate = False
    logger.warning("no answer from %s (%d tries)", "http://me:hunter2@host", 3)
    logger.warning("100%% of %d", 3)
    assert stream.getvalue() == "no answer from http://***@host (3 tries)\n100% of 3\n"


@pytest.mark.parametrize("name", ["cli/__init__.py", "on_ray/serve_environment.py"])
def test_handlers_of_the_package_redact(name: str) -> None:
    """The two places that set handlers up: a third one must do the same and be listed here."""
    package = Path(__file__).parents[2] / "citer_ray"
    sources = {path.relative_to(package).as_posix(): path.read_text("utf-8") for path in package.rglob("*.py")}
    with_handlers = {path for path, text in sources.items() if "addHandler(" in text or "basicConfig(" in text}
    assert name in with_handlers <= {"cli/__init__.py", "on_ray/serve_environment.py"}
    assert "addFilter(RedactingFilter())" in sources[name]
