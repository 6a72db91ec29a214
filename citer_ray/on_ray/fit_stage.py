"""The fit stage: the router of a label set, fitted unless its folder holds it already.

One trainer serves CITER's rounds and the routers of other methods (`on_ray/baselines.py`): shape, features and
objective come from the configuration. Where a router reads more than hidden states, the labels are rewritten with its
features.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from citer_ray.config import FitConfig, RouterConfig
from citer_ray.features import HIDDEN_ALONE
from citer_ray.label_store import LabelManifest, LabelStore
from citer_ray.on_ray.collect import summarise
from citer_ray.on_ray.evaluate import EvaluationPool
from citer_ray.on_ray.train import fit_router
from citer_ray.preparation import Prepared
from citer_ray.router_artifact import RouterMetadata, read_metadata, save_router

logger = logging.getLogger(__name__)

PoolMaker = Callable[[], AbstractContextManager[EvaluationPool]]


def fitted_router(
    prepared: Prepared, name: str, router: RouterConfig, fit: FitConfig, pool: PoolMaker
) -> RouterMetadata:
    """The router of the labels `name`, from its folder or fitted now.

    Args:
        prepared: the run.
        name: of complete labels, and of the router's folder.
        router: its shape and features.
        fit: its training.
        pool: workers that make features, if the router reads any.
    """
    folder = prepared.workspace.router(name)
    manifest = LabelStore(prepared.workspace.labels(name)).read_manifest()
    digest = _digest(manifest.digest(), router.model_dump_json(), fit.model_dump_json(), prepared.config.seed)
    if (folder / "router.json").exists():
        metadata = read_metadata(folder)
        if metadata.labels_digest == digest:
            logger.info("router %s is fitted", name)
            return metadata
    labels = _labels_with_features(prepared, name, manifest, router, pool)
    result = fit_router(
        labels,
        router,
        fit,
        seed=prepared.config.seed,
        storage=prepared.workspace.fits(),
        name=f"{name}-{digest[:12]}",
    )
    metadata = RouterMetadata(
        architecture=router,
        hidden_size=result.router.hidden_size,
        fingerprint=prepared.fingerprint,
        round=manifest.round,
        handoff_token_id=prepared.info.handoff_token_id,
        metrics=result.metrics,
        losses=tuple((epoch.train_loss, epoch.validation_loss) for epoch in result.history),
        labels_digest=digest,
    )
    return save_router(result.router, metadata, folder)


def _labels_with_features(
    prepared: Prepared, name: str, manifest: LabelManifest, router: RouterConfig, pool: PoolMaker
) -> Path:
    """The folder that the router is fitted on: the labels themselves, or the same with its features."""
    source = prepared.workspace.labels(name)
    if router.features == HIDDEN_ALONE:
        return source
    digest = _digest(manifest.digest(), list(router.features), router.top_logits)
    target = prepared.workspace.labels(f"{name}-features-{digest[:8]}")
    with pool() as workers:
        derive_labels(prepared, source, target, digest, lambda a, b: workers.map_rows(a, b, "features", router))
    return target


def derive_labels(
    prepared: Prepared, source: Path, target: Path, digest: str, write: Callable[[LabelStore, LabelStore], None]
) -> LabelManifest:
    """Labels made from complete labels: `write` fills the missing chunks of the second store from the first."""
    store, base = LabelStore.open(target, digest=digest), LabelStore(source).read_manifest()
    if not store.is_complete():
        write(LabelStore(source), store)
        summary = summarise(
            store,
            prepared,
            digest=digest,
            data_digest=base.data_digest,
            round=base.round,
            quarantined=base.quarantined,
            new_tokens=0,
            seconds=0.0,
        )
        store.write_manifest(summary)
    return store.read_manifest()


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
