"""Routers by name: versions that never change, new ones behind old names, and names that are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from citer_ray.config import RouterConfig
from citer_ray.errors import ConfigError, DataError, PairError
from citer_ray.fingerprint import PairFingerprint
from citer_ray.on_ray.serve_routers import RouterSource
from citer_ray.router import Router
from citer_ray.router_artifact import RouterMetadata, load_router, save_router

FINGERPRINT = PairFingerprint(slm="a" * 32, llm="b" * 32, tokenizer="c" * 32)


def write(folder: Path, seed: int, threshold: float = 0.4) -> None:
    config = RouterConfig(widths=(1.0,), batch_norm=False)
    router = Router(8, config, generator=torch.Generator().manual_seed(seed))
    metadata = RouterMetadata(architecture=config, hidden_size=8, fingerprint=FINGERPRINT, round=1, threshold=threshold)
    save_router(router, metadata, folder)


def source(tmp_path: Path, router: str | None, slm: str = FINGERPRINT.slm) -> RouterSource:
    return RouterSource(router, None, 0.0, str(tmp_path / "copies"), "sqlite:///none.db", slm, 1.0)


def test_a_version_is_a_copy_that_stays(tmp_path: Path) -> None:
    folder = tmp_path / "router"
    write(folder, 0)
    named = source(tmp_path, str(folder))
    first, stamp = named.load().current, named.stamp()
    assert first is not None and first.threshold == 0.4 and first.ref.version.startswith("router-")
    assert named.load().current == first and named.stamp() == stamp
    write(folder, 1, threshold=0.6)
    second = named.load().current
    assert second is not None and second.ref != first.ref and second.threshold == 0.6 and named.stamp() != stamp
    _, kept = load_router(first.ref.source, slm_fingerprint=FINGERPRINT.slm)
    assert kept.threshold == 0.4
    assert sorted(path.name for path in (tmp_path / "copies").iterdir()) == sorted(
        [first.ref.version, second.ref.version]
    )


def test_a_canary_by_user_config(tmp_path: Path) -> None:
    for name, seed in (("old", 0), ("new", 1)):
        write(tmp_path / name, seed)
    named = source(tmp_path, str(tmp_path / "old"))
    assert named.load().canary is None
    routers = named.changed({"canary_router": str(tmp_path / "new"), "canary_fraction": 0.25}).load()
    assert routers.canary is not None and routers.canary_fraction == 0.25
    assert routers.current == named.load().current != routers.canary
    with pytest.raises(ConfigError, match="canary_router"):
        named.changed({"canary": "x"})


def test_wrong_names(tmp_path: Path) -> None:
    assert source(tmp_path, None).load().current is None and source(tmp_path, None).stamp() == ()
    with pytest.raises(DataError, match="router"):
        source(tmp_path, str(tmp_path / "nothing")).load()
    with pytest.raises(ConfigError, match="nothing"):
        source(tmp_path, str(tmp_path / "nothing")).stamp()
    write(tmp_path / "router", 0)
    with pytest.raises(PairError, match="fitted for the SLM"):
        source(tmp_path, str(tmp_path / "router"), slm="d" * 32).load()
    with pytest.raises(ConfigError, match="models:/NAME"):
        source(tmp_path, "models:/broken").stamp()
