"""Configurations: precedence, round trip, digests, and one clear line for each problem."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from citer_ray.config import CiterConfig
from citer_ray.config_loading import RUN_YAML, config_digest, dump_yaml, load_config, write_run_yaml
from citer_ray.errors import ConfigError

MINIMAL: dict[str, Any] = {
    "name": "demo",
    "output_dir": "runs/demo",
    "pair": {"slm": {"path": "embedded:slm"}, "llm": {"path": "embedded:llm"}},
    "data": {"collect": "embedded:train:64"},
}


def minimal_file(folder: Path, **changes: Any) -> Path:
    path = folder / "demo.yaml"
    path.write_text(yaml.safe_dump({**MINIMAL, **changes}), encoding="utf-8")
    return path


def problems(folder: Path, *overrides: str, **changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(minimal_file(folder, **changes), overrides)
    return [line.strip() for line in str(caught.value).splitlines()]


def test_override_wins_over_file_and_file_over_default(tmp_path: Path) -> None:
    path = minimal_file(tmp_path, fit={"batch_size": 64, "patience": 2})
    config = load_config(path, ["fit.batch_size=128", "collect.slm.count=3", "fit.batch_size=256"])
    assert (config.fit.batch_size, config.fit.patience) == (256, 2)
    assert config.fit.max_epochs == CiterConfig.model_validate(MINIMAL).fit.max_epochs
    assert config.collect.slm.count == 3
    assert config.collect.llm.count == 1


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("fit.learning_rate=1e-3", "fit.learning_rate", 0.001),
        ("collect.thresholds=[0.5, 1]", "collect.thresholds", (0.5, 1.0)),
        ("data.test=null", "data.test", None),
        ("data.test=", "data.test", None),
        ("data.test=hub:openai/gsm8k:main", "data.test", "hub:openai/gsm8k:main"),
        ("pair.handoff_token=7", "pair.handoff_token", 7),
        ("pair.handoff_token=<|handoff|>", "pair.handoff_token", "<|handoff|>"),
        ("prompt.math='{question}=?'", "prompt.math", "{question}=?"),
        (" collect.shortcut =false", "collect.shortcut", False),
        ("collect.rollouts={count: 2, num_cpus: 0.5}", "collect.rollouts.num_cpus", 0.5),
        ("tracking.uri=http://host:5000", "tracking.uri", "http://host:5000"),
    ],
)
def test_override_values_are_yaml(tmp_path: Path, override: str, path: str, value: object) -> None:
    found: Any = load_config(minimal_file(tmp_path), [override])
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value


def test_empty_section_takes_its_defaults(tmp_path: Path) -> None:
    config = load_config(minimal_file(tmp_path, fit=None, collect={"slm": None}))
    assert config == CiterConfig.model_validate(MINIMAL)


def test_unknown_key_names_itself_the_close_match_and_the_allowed_ones(tmp_path: Path) -> None:
    header, line = problems(tmp_path, collect={"max_new_tokns": 4})
    assert header == f"configuration {tmp_path / 'demo.yaml'}: 1 problem"
    assert line.startswith("collect.max_new_tokns: unknown key; did you mean max_new_tokens?")
    assert "Allowed in collect: examples_per_chunk, shortcut," in line


def test_key_in_the_wrong_section_is_found_where_it_belongs(tmp_path: Path) -> None:
    (_, line) = problems(tmp_path, "max_rounds=2")
    assert line.startswith("max_rounds (given as an override): unknown key; did you mean iterate.max_rounds?")
    assert "Allowed in the top level: name, output_dir, seed, pair" in line


def test_key_without_a_relative_gets_no_suggestion(tmp_path: Path) -> None:
    (_, line) = problems(tmp_path, "fit.zzzzzz=2")
    assert "unknown key. Allowed in fit: objective" in line


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "engine.kind=vlm",
            "engine.kind (given as an override): 'vlm' is not allowed; allowed: `transformers` or `vllm`",
        ),
        ("fit.dropout=1", "fit.dropout (given as an override): unknown key"),
        (
            "router.dropout=1",
            "router.dropout (given as an override): 1 is not allowed; allowed: number >= 0 and < 1",
        ),
        ("collect.max_new_tokens=0", "0 is not allowed; allowed: integer >= 1"),
        ("data.collect_limit=-1", "-1 is not allowed; allowed: integer >= 1, or null"),
        ("evaluate.llm_shares=[0.1, 7]", "evaluate.llm_shares.1 (given as an override): 7 is not allowed"),
        ("name=2024", "2024 is not allowed; allowed: string matching"),
        ("name=a/b", "'a/b' is not allowed; allowed: string matching `^[A-Za-z0-9]"),
        ("collect=3", "collect (given as an override): 3 is not allowed; allowed: section"),
        ("pair.handoff_token=[1]", "[1] is not allowed; allowed: string, or integer, or null"),
        (
            "collect.slm.count=many",
            "collect.slm.count (given as an override): 'many' is not allowed; allowed: integer >= 1",
        ),
        ("collect.thresholds=[.nan]", "thresholds must hold at least one number, all >= 0"),
        ("fit.learning_rate=.nan", "allowed: number > 0"),
    ],
)
def test_bad_value_names_field_value_and_allowed_values(tmp_path: Path, override: str, line: str) -> None:
    lines = problems(tmp_path, override)
    assert len(lines) == 2
    assert line in lines[1]


def test_number_for_a_string_asks_for_quotes(tmp_path: Path) -> None:
    (_, line) = problems(tmp_path, "pair.slm.revision=1.0")
    assert line.endswith("1.0 is not allowed; allowed: string, or null; put it in quotes to make it a string")


def test_contradiction_between_keys_is_named_after_its_section(tmp_path: Path) -> None:
    (_, line) = problems(tmp_path, collect={"both_wrong": "slm", "branches": "mismatches"})
    assert line.startswith("collect: both_wrong: slm takes no rollouts")


def test_every_problem_has_a_line(tmp_path: Path) -> None:
    header, *lines = problems(tmp_path, "fit.patience=0", fit={"objctive": "dpo"}, data={}, engine={"kind": 1})
    assert header.endswith("4 problems")
    assert {line.split(" ")[0].rstrip(":") for line in lines} == {
        "fit.patience",
        "fit.objctive",
        "data.collect",
        "engine.kind",
    }
    assert "data.collect: missing; allowed: string, or list of strings (Source of the examples" in "\n".join(lines)


@pytest.mark.parametrize("override", ["fit.patience", "=3", "fit..patience=3", ".a=1", "a.=1", ""])
def test_malformed_override(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=r"is malformed; write section\.key=value"):
        load_config(minimal_file(tmp_path), [override])


def test_override_with_invalid_yaml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the value is not valid YAML \(line 1, column .*quote it"):
        load_config(minimal_file(tmp_path), ["collect.thresholds=[0.9"])


def test_override_below_a_value(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name is a value"):
        load_config(minimal_file(tmp_path), ["name.first=3"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("- a\n- b\n", "must be a mapping of sections, not a list"),
        ("name: [1\n", r"is not valid YAML: line 2, column 1"),
        ("name: a\nseed: 1\nname: b\n", "line 3, column 1: key 'name' twice"),
        ("fit:\n  patience: 1\n  patience: 2\n", "line 3, column 3: key 'patience' twice"),
        ("name: !!python/object/apply:os.getcwd []\n", "is not valid YAML"),
    ],
)
def test_unusable_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_missing_file_folder_and_binary_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml does not exist"):
        load_config(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "binary.yaml")


def test_run_yaml_reloads_to_an_equal_config(tmp_path: Path) -> None:
    overrides = [
        "collect.thresholds=[0.9, .inf]",
        "fit.learning_rate=1e-7",
        "pair.handoff_token='7'",
        "data.test='null'",
    ]
    config = load_config(minimal_file(tmp_path, prompt={"chat": True}), overrides)
    path = write_run_yaml(config, tmp_path / "out" / "deep")
    assert path == tmp_path / "out" / "deep" / RUN_YAML
    assert load_config(path) == config
    assert [file.name for file in path.parent.iterdir()] == [RUN_YAML]


@settings(deadline=None, max_examples=30)
@example(path="Ô}.\x85\x85\U00013f7a", revision="", seed=0, rate=0.1)
@given(path=st.text(), revision=st.none() | st.text(), seed=st.integers(), rate=st.floats(1e-300, 1e300))
def test_dump_survives_any_text_and_number(path: str, revision: str | None, seed: int, rate: float) -> None:
    values = {
        **MINIMAL,
        "seed": seed,
        "fit": {"learning_rate": rate},
        "pair": {"slm": {"path": path, "revision": revision}, "llm": {"path": "b"}},
    }
    config = CiterConfig.model_validate(values)
    assert CiterConfig.model_validate(yaml.safe_load(dump_yaml(config))) == config


def test_digest_depends_on_the_chosen_sections_alone() -> None:
    config = CiterConfig.model_validate(MINIMAL)
    other = CiterConfig.model_validate({**MINIMAL, "fit": {"patience": 2}, "collect": {"rollouts_in_flight": 3}})
    sections = ["pair", "data", "collect"]
    exclude = ["collect.rollouts_in_flight", "collect.slm"]
    assert config_digest(config, sections) == config_digest(config, reversed(sections))
    assert config_digest(config, sections) != config_digest(other, sections)
    assert config_digest(config, sections, exclude=exclude) == config_digest(other, sections, exclude=exclude)
    assert config_digest(config, ["collect.max_new_tokens"]) == config_digest(other, ["collect.max_new_tokens"])
    assert config_digest(config, ["fit"]) != config_digest(other, ["fit"])
    assert config_digest(config, ["seed"]) != config_digest(config, ["name"])
    assert len(config_digest(config, ["fit"])) == 64


def test_digest_is_stable_across_processes_and_releases() -> None:
    config = CiterConfig.model_validate(MINIMAL)
    # SHA-256 of {"pair.handoff_token":null,"seed":0}, worked out with sha256sum.
    expected = "f4c5b35a87958029ad9b3508307297bd2904128d6f1187acbc72918e0f7c8211"
    assert config_digest(config, ["seed", "pair.handoff_token"]) == expected


@pytest.mark.parametrize("path", ["colect", "collect.nothing", "seed.x", ""])
def test_digest_of_an_unknown_section(path: str) -> None:
    config = CiterConfig.model_validate(MINIMAL)
    with pytest.raises(ConfigError, match="no section or key"):
        config_digest(config, [path])
    with pytest.raises(ConfigError, match="no section or key"):
        config_digest(config, ["fit"], exclude=[path])
