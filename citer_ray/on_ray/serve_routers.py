"""From the names of routers to versions that replicas can load: folders and registry aliases, copied and digested.

A version is named by its weights, and its copy never changes: so a folder that is fitted again, or an alias that
moves, gives a new version, while responses in progress keep theirs. The copies lie in the run's output folder, which
all nodes must see.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from citer_ray.config import CiterConfig
from citer_ray.errors import ConfigError, DataError
from citer_ray.file_replacement import replacing
from citer_ray.router_artifact import METADATA_FILE, WEIGHTS_FILE, load_router
from citer_ray.serving.jobs import RouterRef
from citer_ray.serving.routers import RoutersInService, ServedRouter
from citer_ray.storage import absolute, file_stamp, is_remote, storage_path

COPIES = "served_routers"


@dataclass(frozen=True)
class RouterSource:
    """Names of routers, and the pair that they must belong to.

    Attributes:
        router: folder or `models:/NAME@ALIAS` of the router in service; None serves the models alone.
        canary: the same of a candidate.
        canary_fraction: part of the routed requests that it gets.
        copies: folder of the copies.
        tracking_uri: of the registry.
        slm_fingerprint: of the SLM.
        poll_s: how often the names are resolved again; None never.
    """

    router: str | None
    canary: str | None
    canary_fraction: float
    copies: str
    tracking_uri: str
    slm_fingerprint: str
    poll_s: float | None

    def changed(self, user_config: dict[str, Any]) -> RouterSource:
        """With other names.

        Raises:
            ConfigError: a key is unknown.
        """
        names = {"router": "router", "canary_router": "canary", "canary_fraction": "canary_fraction"}
        if unknown := sorted(set(user_config) - set(names)):
            raise ConfigError(f"user_config has unknown keys {', '.join(unknown)}; there are {', '.join(names)}")
        return replace(self, **{names[key]: value for key, value in user_config.items()})

    def stamp(self) -> tuple[str, ...]:
        """What tells cheaply whether another router is behind a name.

        Raises:
            ConfigError: a router cannot be found.
        """
        return tuple(self._stamp(name) for name in (self.router, self.canary) if name is not None)

    def _stamp(self, name: str) -> str:
        if name.startswith("models:/"):
            from citer_ray.mlflow_store import registered_version

            return registered_version(name, self.tracking_uri)
        try:
            stamps = [file_stamp(storage_path(name) / file) for file in (WEIGHTS_FILE, METADATA_FILE)]
        except (OSError, DataError) as error:
            raise ConfigError(f"the router {name} cannot be read: {error}") from error
        return str(stamps)

    def load(self) -> RoutersInService:
        """Resolve, check and copy.

        Raises:
            ConfigError, DataError, PairError: a router cannot be found or used.
        """
        current, canary = self._served(self.router), self._served(self.canary)
        return RoutersInService(current, canary, self.canary_fraction if canary else 0.0)

    def _served(self, name: str | None) -> ServedRouter | None:
        if name is None:
            return None
        with tempfile.TemporaryDirectory() as temporary:
            folder = self._fetched(name, Path(temporary))
            _, metadata = load_router(folder, slm_fingerprint=self.slm_fingerprint)
            parts = {file: (folder / file).read_bytes() for file in (WEIGHTS_FILE, METADATA_FILE)}
            digest = hashlib.sha256(b"".join(parts.values())).hexdigest()
            version = f"{PurePosixPath(name).name.partition('@')[0]}-{digest[:8]}"
            copy = storage_path(self.copies) / version
            if not (copy / METADATA_FILE).exists():  # which is the last; another replica writes the same bytes
                for file, content in parts.items():
                    with replacing(copy / file) as unfinished:
                        unfinished.write_bytes(content)
        return ServedRouter(RouterRef(version, str(copy)), metadata.threshold, metadata.calibration)

    def _fetched(self, name: str, temporary: Path) -> Path:
        if not name.startswith("models:/"):
            return storage_path(name)
        from citer_ray.mlflow_store import fetch_router

        return fetch_router(name, temporary, self.tracking_uri)


def router_source(config: CiterConfig, slm_fingerprint: str) -> RouterSource:
    """The routers of a configuration."""
    from citer_ray.mlflow_store import URI_VARIABLE, tracking_uri

    serve = config.serve
    names = [name for name in (serve.router, serve.canary_router) if name is not None]
    # Beside an object store no registry is by default, and none is needed for folders.
    registry = any(name.startswith("models:/") for name in names) or not is_remote(storage_path(config.output_dir))
    copies = absolute(storage_path(config.output_dir)) / COPIES
    folders = [
        name if name is None or name.startswith("models:/") else str(absolute(storage_path(name)))
        for name in (serve.router, serve.canary_router)
    ]
    return RouterSource(
        folders[0],
        folders[1],
        serve.canary_fraction,
        str(copies),
        tracking_uri(config) if registry or config.tracking.uri or os.environ.get(URI_VARIABLE) else "",
        slm_fingerprint,
        serve.router_poll_s,
    )
