"""`citer serve` refuses what cannot be served before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from citer_ray.cli import main

CONFIG = Path(__file__).parents[2] / "configs" / "embedded.yaml"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--router", "no/such/folder"], "no/such/folder is not a folder"),
        (["serve.slm={min_replicas: 0}"], "only the LLM scales to zero"),
        (["serve.canary_fraction=0.5"], "there is no canary_router"),
        (["serve.llm={min_replicas: 3}"], "above max_replicas"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--config", str(CONFIG), *arguments])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
