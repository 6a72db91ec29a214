"""MLflow behind the `Tracker` protocol: one parent run for each output folder, one nested run for each round.

Fed by `tracking_backlog` with operations, in the driver alone; writes to the store that `mlflow_store` opens with the
first operation. The ids of MLflow's runs are kept in `tracking.json` in the output folder, and the runs carry a tag
with the folder's key, so that a resumed run goes on with the same MLflow runs even where that file is lost.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from citer_ray import __version__
from citer_ray.config import CiterConfig
from citer_ray.errors import DataError, RetryableError
from citer_ray.file_replacement import replacing
from citer_ray.mlflow_store import artifact_location, brief, is_permanent, open_client, quieten, tracking_uri
from citer_ray.provenance import PROVENANCE_JSON
from citer_ray.redaction import without_credentials
from citer_ray.storage import absolute, local_copy, storage_path
from citer_ray.tracking import NullTracker, Tracker
from citer_ray.tracking_backlog import BufferedTracker, Operation

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run
    from mlflow.entities.model_registry import ModelVersion

logger = logging.getLogger(__name__)

STATE_JSON = "tracking.json"
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
_PARAMS_PER_BATCH = 100
_METRICS_PER_BATCH = 1000


def make_tracker(config: CiterConfig, environ: Mapping[str, str] = os.environ) -> Tracker:
    """The tracker of a run; nothing is imported or opened yet.

    Raises:
        ConfigError: `tracking.uri`, or MLFLOW_TRACKING_URI in its place, is not a tracking URI.
    """
    if not config.tracking.enabled:
        return NullTracker()
    return BufferedTracker(MlflowBackend(config, tracking_uri(config, environ)), storage_path(config.output_dir))


@dataclass
class _State:
    """The backend's ids, kept in the output folder so that a resumed run goes on with the same MLflow runs."""

    uri: str
    parent: str | None = None
    rounds: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


class MlflowBackend:
    """Carries out tracking operations; see `tracking_backlog.Backend`."""

    def __init__(self, config: CiterConfig, uri: str) -> None:
        self._config, self._uri = config, uri
        self._output_dir = storage_path(config.output_dir)
        self._experiment_name = config.tracking.experiment or config.name
        self._model_name = config.tracking.registered_model or config.name
        folder = f"{self._experiment_name}\n{absolute(self._output_dir)}"
        self._run_key = hashlib.sha256(folder.encode("utf-8")).hexdigest()[:32]
        self._state = _load_state(self._output_dir / STATE_JSON, without_credentials(uri))
        self._checked: set[str] = set()
        self._client: MlflowClient | None = None

    @property
    def description(self) -> str:
        """See `Backend`."""
        return f"MLflow at {without_credentials(self._uri)}"

    def apply(self, operation: Operation) -> str | None:
        """See `Backend`."""
        quieten()
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        try:
            result: str | None = getattr(self, f"_{operation.kind}")(operation)
        except MlflowException as error:
            if is_permanent(error, self._uri):
                raise
            self._checked.clear()  # what is there when the server is back may not be what was there before
            raise RetryableError(brief(error)) from error
        except (OSError, SQLAlchemyError) as error:  # requests' errors are OSErrors
            self._checked.clear()
            raise RetryableError(brief(error)) from error
        return result

    # Operations, by kind.

    def _experiment(self, operation: Operation) -> None:
        run_id = self._parent_id()
        self._log_params(run_id, operation.arguments["params"])

    def _round(self, operation: Operation) -> None:
        self._log_params(self._run_id(operation.round), operation.arguments["params"])

    def _metrics(self, operation: Operation) -> None:
        values = operation.arguments["values"]
        self._log_metrics(self._run_id(operation.round), values, operation.at_ms)
        if operation.round is not None and operation.arguments["by_round"]:
            by_round = [(key, value, operation.round) for key, value, _ in values]
            self._log_metrics(self._parent_id(), by_round, operation.at_ms)

    def _artifact(self, operation: Operation) -> None:
        stored, folder = storage_path(operation.arguments["path"]), operation.arguments["folder"] or None
        run_id = self._run_id(operation.round)
        if not stored.exists():
            raise DataError(f"artifact {stored} does not exist")
        with local_copy(stored) as path:
            log = self._open().log_artifacts if path.is_dir() else self._open().log_artifact
            log(run_id, str(path), folder)

    def _dataset(self, operation: Operation) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        given = operation.arguments
        dataset = Dataset(
            name=str(given["source"])[:500],
            digest=str(given["digest"])[:36],
            source_type="citer_ray",
            source=json.dumps({"source": given["source"], "digest": given["digest"]}),
            profile=json.dumps({"num_examples": given["num_examples"]}),
        )
        tags = [InputTag("mlflow.data.context", given["context"])]
        self._open().log_inputs(self._run_id(operation.round), datasets=[DatasetInput(dataset, tags)])

    def _router(self, operation: Operation) -> str:
        """Log the folder and register it; a router that is registered already keeps its version."""
        stored = storage_path(operation.arguments["folder"])
        if not stored.is_dir():
            raise DataError(f"router folder {stored} does not exist")
        with local_copy(stored) as folder:
            return self._registered(folder, operation)

    def _registered(self, folder: Path, operation: Operation) -> str:
        client, run_id = self._open(), self._run_id(operation.round)
        digest = _folder_digest(folder)
        for version in self._versions(run_id):
            if version.tags.get("citer.digest") == digest:
                return self._remember_version(operation.round, version.version)
        # A folder for each router: a version must not change when a round is fitted anew.
        artifact_path = f"router-{digest[:8]}"
        client.log_artifacts(run_id, str(folder), artifact_path)
        source = f"{client.get_run(run_id).info.artifact_uri}/{artifact_path}"
        self._ensure_registered_model()
        created = client.create_model_version(
            self._model_name,
            source,
            run_id,
            tags={"citer.digest": digest, "citer.round": str(operation.round)},
            description=f"Router of round {operation.round} of {self._config.name}",
            await_creation_for=0,
        )
        return self._remember_version(operation.round, created.version)

    def _promote(self, operation: Operation) -> None:
        version = self._state.versions.get(str(operation.round)) or self._find_version(operation.round)
        if version is None:
            raise DataError(f"round {operation.round} has no registered router to promote")
        self._open().set_registered_model_alias(self._model_name, operation.arguments["alias"], version)

    def _end(self, operation: Operation) -> None:
        status = _STATUS[operation.arguments["status"]]
        self._open().set_terminated(self._run_id(operation.round), status, operation.at_ms)

    # The client and MLflow's ids.

    def _open(self) -> MlflowClient:
        if self._client is None:
            self._client = open_client(self._uri)
        return self._client

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        client = self._open()
        found = client.get_experiment_by_name(self._experiment_name)
        if found is None:
            try:
                location = artifact_location(self._config, self._uri, self._experiment_name)
                return str(client.create_experiment(self._experiment_name, location))
            except MlflowException as error:
                found = client.get_experiment_by_name(self._experiment_name)  # another run was faster
                if found is None:
                    raise error
        if found.lifecycle_stage == "deleted":
            logger.info("MLflow experiment %s was deleted; it is restored", self._experiment_name)
            client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)

    def _run_id(self, number: int | None) -> str:
        if number is None:
            return self._parent_id()
        parent = self._parent_id()
        tags = {"citer.round": str(number), "mlflow.parentRunId": parent}
        run_id = self._resume_or_create(self._state.rounds.get(str(number)), f"round-{number}", tags)
        if self._state.rounds.get(str(number)) != run_id:
            self._state.rounds[str(number)] = run_id
            self._save_state()
        return run_id

    def _parent_id(self) -> str:
        tags = {"citer.round": "none", "citer.version": __version__, **_revision_tag(self._output_dir)}
        run_id = self._resume_or_create(self._state.parent, self._config.name, tags)
        if self._state.parent != run_id:
            self._state = _State(self._state.uri, parent=run_id)
            self._save_state()
        return run_id

    def _resume_or_create(self, known: str | None, name: str, tags: dict[str, str]) -> str:
        """The run that is remembered, else one with the same key and round, else a new one; set to running."""
        if known is not None and known in self._checked:
            return known
        client = self._open()
        run = self._usable(known) or self._find_run(tags["citer.round"])
        if run is None:
            run = client.create_run(self._experiment_id(), tags={"citer.run": self._run_key, **tags}, run_name=name)
        elif run.info.status != "RUNNING":
            client.update_run(run.info.run_id, status="RUNNING")
        self._checked.add(run.info.run_id)
        return str(run.info.run_id)

    def _usable(self, run_id: str | None) -> Run | None:
        """The remembered run, unless it was deleted or belongs to a store that is gone."""
        from mlflow.exceptions import MlflowException

        if run_id is None:
            return None
        try:
            run = self._open().get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return run if run.info.lifecycle_stage == "active" else None

    def _find_run(self, round_tag: str) -> Run | None:
        condition = f"tags.`citer.run` = '{self._run_key}' and tags.`citer.round` = '{round_tag}'"
        found = self._open().search_runs([self._experiment_id()], condition, max_results=1)
        return found[0] if found else None

    def _log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        """Params of a run never change in MLflow; a resumed run's changed ones become tags."""
        from mlflow.entities import Param, RunTag

        client = self._open()
        logged = client.get_run(run_id).data.params
        new = [Param(key, value) for key, value in params.items() if key not in logged]
        changed = [
            RunTag(f"citer.changed.{key}", value)
            for key, value in params.items()
            if key in logged and logged[key] != value
        ]
        for batch in _batches(new, _PARAMS_PER_BATCH):
            client.log_batch(run_id, params=batch)
        for batch in _batches(changed, _PARAMS_PER_BATCH):
            client.log_batch(run_id, tags=batch)

    def _log_metrics(self, run_id: str, values: Iterable[tuple[str, float, int]], at_ms: int) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(key, value, at_ms, step) for key, value, step in values]
        for batch in _batches(metrics, _METRICS_PER_BATCH):
            self._open().log_batch(run_id, metrics=batch)

    def _ensure_registered_model(self) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._open().create_registered_model(self._model_name)
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_ALREADY_EXISTS", "ALREADY_EXISTS"):
                raise

    def _find_version(self, number: int | None) -> str | None:
        versions = self._versions(self._run_id(number))
        return max((str(version.version) for version in versions), key=int, default=None)

    def _versions(self, run_id: str) -> list[ModelVersion]:
        found = self._open().search_model_versions(f"run_id = '{run_id}'")
        return [version for version in found if version.name == self._model_name]

    def _remember_version(self, number: int | None, version: object) -> str:
        self._state.versions[str(number)] = str(version)
        self._save_state()
        return str(version)

    def _save_state(self) -> None:
        try:
            with replacing(self._output_dir / STATE_JSON) as temporary:
                temporary.write_text(json.dumps(asdict(self._state), indent=2) + "\n", encoding="utf-8")
        except DataError as error:  # the runs are found by their tags as well
            logger.debug("%s", error)


def _load_state(path: Path, uri: str) -> _State:
    """What is remembered about this store; another store, or a damaged file, starts afresh."""
    try:
        state = _State(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return _State(uri)
    return state if state.uri == uri else _State(uri)


def _revision_tag(output_dir: Path) -> dict[str, str]:
    try:
        git = json.loads((output_dir / PROVENANCE_JSON).read_text(encoding="utf-8"))["git"]
        return {"mlflow.source.git.commit": git["revision"]} if git else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _folder_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _batches(items: list[Any], size: int) -> list[list[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
