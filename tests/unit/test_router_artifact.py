"""The router's folder: round trip, refusals, cut saves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from citer_ray.calibration import CalibrationTable
from citer_ray.config import RouterConfig
from citer_ray.errors import DataError, PairError
from citer_ray.fingerprint import PairFingerprint
from citer_ray.router import Router
from citer_ray.router_artifact import RouterMetadata, load_router, read_metadata, save_router
from citer_ray.router_metrics import router_metrics

H = 8


def make_router(seed: int = 0) -> Router:
    return Router(H, RouterConfig(), generator=torch.Generator().manual_seed(seed))


METADATA = RouterMetadata(
    architecture=RouterConfig(),
    hidden_size=H,
    fingerprint=PairFingerprint(slm="slm-1", llm="llm-1", tokenizer="tok-1"),
    round=2,
    threshold=0.9,
    calibration=CalibrationTable.fit([(0.1, 0.5), (0.2, 0.9)]),
    handoff_token_id=7,
    metrics=router_metrics([0.2, 0.9], [0.0, 1.0], [1, 0]),
    labels_digest="abc",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_router(make_router(), METADATA, tmp_path / "router")
    return tmp_path / "router"


def test_what_is_saved_is_loaded(folder: Path) -> None:
    router, metadata = load_router(folder, slm_fingerprint="slm-1", hidden_size=H)
    assert metadata.model_copy(update={"weights_sha256": None}) == METADATA
    expected = make_router().state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in router.state_dict().items())
    assert not router.training
    assert not any(parameter.requires_grad for parameter in router.parameters())
    assert sorted(path.name for path in folder.iterdir()) == ["router.json", "router.safetensors"]


def test_loading_leaves_the_global_generator_alone(folder: Path) -> None:
    before = torch.random.get_rng_state()
    load_router(folder, slm_fingerprint=None)
    assert torch.equal(before, torch.random.get_rng_state())


def test_saving_over_a_router_replaces_it(folder: Path) -> None:
    save_router(make_router(5), METADATA.model_copy(update={"round": 3}), folder)
    router, metadata = load_router(folder, slm_fingerprint="slm-1")
    assert metadata.round == 3
    assert torch.equal(router.output.weight, make_router(5).output.weight)


def test_another_slm_is_refused_and_both_are_named(folder: Path) -> None:
    with pytest.raises(PairError, match=r"slm-1, this SLM is slm-2.*citer fit"):
        load_router(folder, slm_fingerprint="slm-2")


def test_another_hidden_size_is_refused(folder: Path) -> None:
    with pytest.raises(PairError, match="width 8, this SLM gives 16"):
        load_router(folder, slm_fingerprint="slm-1", hidden_size=16)


@pytest.mark.parametrize("name", ["router.json", "router.safetensors"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        load_router(folder, slm_fingerprint="slm-1")


def test_an_unknown_schema_is_refused(folder: Path) -> None:
    path = folder / "router.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 2}))
    with pytest.raises(DataError, match="schema version 2, this release reads 1"):
        read_metadata(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ("[]", "schema version None"), ('{"schema_version": 1}', "does not describe")],
)
def test_broken_metadata_are_refused(folder: Path, text: str, message: str) -> None:
    (folder / "router.json").write_text(text)
    with pytest.raises(DataError, match=message):
        load_router(folder, slm_fingerprint="slm-1")


def test_weights_of_another_save_are_noticed(folder: Path, tmp_path: Path) -> None:
    save_router(make_router(9), METADATA, tmp_path / "other")
    (folder / "router.safetensors").write_bytes((tmp_path / "other" / "router.safetensors").read_bytes())
    with pytest.raises(DataError, match="a save was cut"):
        load_router(folder, slm_fingerprint="slm-1")


def test_weights_of_another_shape_are_noticed(folder: Path) -> None:
    path = folder / "router.json"
    content = json.loads(path.read_text())
    content["architecture"]["widths"] = [1.0]
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="does not hold the weights"):
        load_router(folder, slm_fingerprint="slm-1")


def test_damaged_weights_are_noticed(folder: Path) -> None:
    (folder / "router.safetensors").write_bytes(b"\x00" * 40)
    path = folder / "router.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"weights_sha256": None}))
    with pytest.raises(DataError, match="does not hold the weights"):
        load_router(folder, slm_fingerprint="slm-1")


def test_metadata_of_another_router_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="another architecture"):
        save_router(make_router(), METADATA.model_copy(update={"hidden_size": 9}), tmp_path)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    router = make_router()
    with torch.no_grad():
        router.output.bias.fill_(float("nan"))
    with pytest.raises(DataError, match=r"not finite in output\.bias"):
        save_router(router, METADATA, tmp_path)
    assert not list(tmp_path.iterdir())
