"""Where MLflow's data lies, and how it is opened without side effects.

Read by `mlflow_tracker` (writing) and by serving (fetching a registered router). By default the store is a sqlite
file beside the output folders (`runs/mlflow.db`, artifacts in `runs/mlartifacts`). MLflow is imported by the functions
that need it and no earlier: that takes 1.5 s, opening a sqlite store 0.7 s, and making one 6 s (MLflow's migrations).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from citer_ray.config import CiterConfig
from citer_ray.errors import ConfigError
from citer_ray.redaction import without_credentials
from citer_ray.storage import is_remote, storage_path

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

URI_VARIABLE = "MLFLOW_TRACKING_URI"
SQLITE_NAME = "mlflow.db"
ARTIFACTS_NAME = "mlartifacts"

_HTTP = ("http", "https")
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_MANAGED = ("databricks", "databricks-uc", "uc")
# MLflow waits 120 s and repeats 7 times by default: a lost server would stall a run for a quarter of an hour.
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
_NOISY_LOGGERS = ("mlflow", "alembic", "sqlalchemy", "urllib3.connectionpool")
# Everything else (internal errors, time-outs, refused log-ins) may be gone later.
_PERMANENT_CODES = {
    "INVALID_PARAMETER_VALUE",
    "BAD_REQUEST",
    "MALFORMED_REQUEST",
    "RESOURCE_ALREADY_EXISTS",
    "RESOURCE_DOES_NOT_EXIST",
    "ENDPOINT_NOT_FOUND",
    "NOT_IMPLEMENTED",
    "FEATURE_DISABLED",
}


def tracking_uri(config: CiterConfig, environ: Mapping[str, str] = os.environ) -> str:
    """`tracking.uri`, else MLFLOW_TRACKING_URI, else a sqlite file beside the output folder.

    Raises:
        ConfigError: the URI is malformed or of an unknown kind; or there is none, and the output folder is in an object
            store, beside which no sqlite file can be.
    """
    for uri, origin in ((config.tracking.uri, "tracking.uri"), (environ.get(URI_VARIABLE), URI_VARIABLE)):
        if uri:
            _check_uri(uri, origin)
            return uri
    if is_remote(_shared_folder(config)):
        raise ConfigError(
            f"tracking.uri is null and output_dir is {config.output_dir}, where no sqlite file can be: set "
            f"tracking.uri or {URI_VARIABLE} (http://host:5000, sqlite:////local/mlflow.db), or tracking.enabled=false"
        )
    return f"sqlite:///{_shared_folder(config) / SQLITE_NAME}"


def _shared_folder(config: CiterConfig) -> Path:
    """The folder that holds the output folders of several runs, which share one store."""
    return storage_path(config.output_dir).absolute().parent


def _check_uri(uri: str, origin: str) -> None:
    shown = without_credentials(uri)
    try:
        parts = urlsplit(uri)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{origin}: {shown!r} is not a URI ({error}); write for example http://host:5000") from None
    scheme = parts.scheme.partition("+")[0]
    if scheme in _HTTP and not host:
        raise ConfigError(f"{origin}: {shown!r} names no host; write for example http://host:5000")
    if scheme == "sqlite" and not (uri.startswith("sqlite:///") and len(uri) > len("sqlite:///")):
        raise ConfigError(f"{origin}: {shown!r} names no file; write sqlite:///relative.db or sqlite:////absolute.db")
    if scheme not in (*_HTTP, *_DATABASES) and uri.partition(":")[0] not in _MANAGED:
        raise ConfigError(
            f"{origin}: {shown!r} is not a tracking URI; use http://host:port, https://..., sqlite:///file.db, "
            "postgresql://..., mysql://... or databricks (MLflow no longer takes plain folders)"
        )


def artifact_location(config: CiterConfig, uri: str, experiment: str) -> str | None:
    """Beside the sqlite file; None leaves it to the server. MLflow's own default is `./mlruns`."""
    if not _is_database(uri):
        return None
    folder = _shared_folder(config)
    if uri.startswith("sqlite:///"):
        folder = _sqlite_path(uri).absolute().parent
    return (folder / ARTIFACTS_NAME / experiment).as_uri()


def open_client(uri: str) -> MlflowClient:
    """A client of the store; the fluent API is not used, since it keeps global state and makes `./mlflow.db`.

    Raises:
        OSError, SQLAlchemyError: a database cannot be opened.
    """
    quieten()
    if _is_database(uri):
        _try_database(uri)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def is_permanent(error: MlflowException, uri: str) -> bool:
    """Whether repeating a call is useless. A 404 that is not MLflow's own comes from a proxy or a wrong port."""
    from mlflow.exceptions import RestException

    foreign = uri.startswith(_HTTP) and not isinstance(error, RestException)
    missing = error.error_code in ("RESOURCE_DOES_NOT_EXIST", "ENDPOINT_NOT_FOUND")
    return error.error_code in _PERMANENT_CODES and not (foreign and missing)


def fetch_router(model_uri: str, destination: str | Path, uri: str) -> Path:
    """Download a registered router.

    Args:
        model_uri: `models:/NAME@ALIAS` or `models:/NAME/VERSION`.
        destination: folder for the files.
        uri: tracking URI of the server or store.

    Raises:
        ConfigError: the URI is malformed, or no such version is registered.
    """
    _check_uri(uri, "tracking URI")
    name, alias, version = _parse_model_uri(model_uri)
    failure = f"{model_uri} cannot be fetched from MLflow at {without_credentials(uri)}"
    if uri.startswith("sqlite:///") and not _sqlite_path(uri).exists():
        raise ConfigError(f"{failure}: there is no such file")
    quieten()
    import mlflow
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        client = open_client(uri)
        if alias:
            version = client.get_model_version_by_alias(name, alias).version
        source = client.get_model_version_download_uri(name, str(version))
        path = mlflow.artifacts.download_artifacts(source, dst_path=str(destination), tracking_uri=uri)
    except (MlflowException, OSError, SQLAlchemyError) as error:
        raise ConfigError(f"{failure}: {brief(error)}") from error
    return Path(path)


def registered_version(model_uri: str, uri: str) -> str:
    """The version that `models:/NAME@ALIAS` means at the moment, without fetching it.

    Raises:
        ConfigError: the URI is malformed, or no such version is registered.
    """
    name, alias, version = _parse_model_uri(model_uri)
    if not alias:
        return version
    quieten()
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        return str(open_client(uri).get_model_version_by_alias(name, alias).version)
    except (MlflowException, OSError, SQLAlchemyError) as error:
        raise ConfigError(f"{model_uri} is not found at {without_credentials(uri)}: {brief(error)}") from error


def _parse_model_uri(model_uri: str) -> tuple[str, str, str]:
    """(name, alias, version); one of the last two is empty."""
    body = model_uri.removeprefix("models:/")
    name, at, alias = body.partition("@")
    if not at:
        name, _, version = body.partition("/")
        if body != model_uri and name and version.isdigit():
            return name, "", version
    elif body != model_uri and name and alias and "/" not in body:
        return name, alias, ""
    raise ConfigError(f"{model_uri!r} is not a registered router; write models:/NAME@champion or models:/NAME/3")


def quieten() -> None:
    """Short time-outs and few log lines for this process, wherever the user has not decided otherwise."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import mlflow  # noqa: F401 (sets up its loggers on import)

    for name in _NOISY_LOGGERS:
        if "MLFLOW_LOGGING_LEVEL" not in os.environ:
            logging.getLogger(name).setLevel(logging.ERROR)


def _try_database(uri: str) -> None:
    """Connect once, because MLflow would repeat a failing connection for 100 s.

    Raises:
        OSError: the folder of a sqlite file cannot be made.
        SQLAlchemyError: the database cannot be opened.
    """
    import sqlalchemy

    if uri.startswith("sqlite:///"):
        _sqlite_path(uri).parent.mkdir(parents=True, exist_ok=True)
    engine = sqlalchemy.create_engine(uri, poolclass=sqlalchemy.pool.NullPool)
    with engine.connect() as connection:
        sqlalchemy.inspect(connection).get_table_names()
    engine.dispose()


def _is_database(uri: str) -> bool:
    return urlsplit(uri).scheme.partition("+")[0] in _DATABASES


def _sqlite_path(uri: str) -> Path:
    return Path(uri.removeprefix("sqlite:///").partition("?")[0])


def brief(error: BaseException) -> str:
    """An error as one line without credentials."""
    text = without_credentials(" ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:200]}"
