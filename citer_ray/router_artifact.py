"""The router as a folder: `router.safetensors` (weights) and `router.json` (what they are and what they
belong to).

Fitting writes it, evaluation adds the calibration table, the registry keeps it, and labels, evaluation and
serving load it with `load_router`, which refuses a router of another SLM. No pickle. All reading and writing
of these two files is in this module.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from citer_ray.calibration import CalibrationTable
from citer_ray.config import RouterConfig
from citer_ray.errors import DataError, PairError
from citer_ray.file_replacement import replacing
from citer_ray.fingerprint import PairFingerprint
from citer_ray.router import Router
from citer_ray.router_metrics import RouterMetrics
from citer_ray.storage import storage_path, store_errors

SCHEMA_VERSION = 1
WEIGHTS_FILE = "router.safetensors"
METADATA_FILE = "router.json"


class RouterMetadata(BaseModel):
    """Everything about a router but its weights."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = Field(SCHEMA_VERSION, description="Version of this file's schema.")
    architecture: RouterConfig = Field(description="The router's shape.")
    hidden_size: int = Field(ge=1, description="Width of the hidden states that it reads.")
    fingerprint: PairFingerprint = Field(description="The pair that it was fitted for.")
    round: int = Field(ge=1, description="Round of the labels that it was fitted on.")
    threshold: float = Field(0.5, ge=0, description="Threshold to serve with; the LLM writes iff p_slm is below.")
    calibration: CalibrationTable = Field(
        CalibrationTable(), description="LLM share -> threshold, measured by decoding a validation split."
    )
    handoff_token_id: int | None = Field(None, ge=0, description="Token id that means handoff inside vLLM.")
    metrics: RouterMetrics | None = Field(None, description="Metrics on the held-out part of the labels.")
    losses: tuple[tuple[float, float], ...] = Field(
        (), description="Training and validation loss of each epoch of the fit, under its objective."
    )
    labels_digest: str | None = Field(None, description="Digest of the label manifest.")
    weights_sha256: str | None = Field(None, description="SHA-256 of the weights' file; saving fills it in.")


def save_router(router: Router, metadata: RouterMetadata, folder: Path | str) -> RouterMetadata:
    """Write both files, the metadata last; saving over an older router replaces it.

    The metadata hold the weights' SHA-256, so that a save that was cut between the two files is noticed on
    loading.

    Returns:
        The metadata as written.

    Raises:
        DataError: the router is not the one that the metadata describe, its weights are not finite, or the
            disk is full.
    """
    folder = storage_path(folder)
    if (router.hidden_size, router.config) != (metadata.hidden_size, metadata.architecture):
        raise DataError("the metadata describe another architecture or hidden size than the router has")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in router.state_dict().items()}
    broken = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise DataError(f"router weights are not finite in {', '.join(broken)}; lower fit.learning_rate and fit again")
    data = save_tensors(tensors, metadata={"format": "pt"})
    written = metadata.model_copy(update={"weights_sha256": hashlib.sha256(data).hexdigest()})
    with replacing(folder / WEIGHTS_FILE) as temporary:
        temporary.write_bytes(data)
    with replacing(folder / METADATA_FILE) as temporary:
        temporary.write_text(written.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return written


def load_router(
    folder: Path | str, *, slm_fingerprint: str | None, hidden_size: int | None = None
) -> tuple[Router, RouterMetadata]:
    """Load a router in eval mode, on the CPU, in float32.

    Args:
        folder: what `save_router` wrote.
        slm_fingerprint: fingerprint of the SLM that it shall run on; None does not check (for looking at a
            router).
        hidden_size: width of that SLM's hidden states; None does not check.

    Raises:
        DataError: a file is missing, damaged, of an unknown schema, or does not match the other one.
        PairError: the router belongs to another SLM, or reads hidden states of another width.
    """
    folder = storage_path(folder)
    metadata = read_metadata(folder)
    if slm_fingerprint is not None and metadata.fingerprint.slm != slm_fingerprint:
        raise PairError(
            f"the router in {folder} was fitted for the SLM {metadata.fingerprint.slm}, this SLM is "
            f"{slm_fingerprint}; set pair.slm to that model, or fit a router for this one (citer collect, "
            "then citer fit)"
        )
    if hidden_size is not None and metadata.hidden_size != hidden_size:
        raise PairError(
            f"the router in {folder} reads hidden states of width {metadata.hidden_size}, this SLM gives "
            f"{hidden_size}; use the SLM that it was fitted for, or fit a router for this one"
        )
    unused = torch.Generator()  # the drawn weights are replaced; do not advance the global generator
    router = Router(metadata.hidden_size, metadata.architecture, generator=unused)
    try:
        router.load_state_dict(load_tensors(_read_weights(folder, metadata)))
    except (SafetensorError, RuntimeError) as error:
        raise DataError(
            f"{folder / WEIGHTS_FILE} does not hold the weights that {METADATA_FILE} describes ({error}); fit again"
        ) from error
    return router.eval().requires_grad_(False), metadata


def read_metadata(folder: Path | str) -> RouterMetadata:
    """Read `router.json` alone.

    Raises:
        DataError: it is missing, damaged, or of an unknown schema.
    """
    path = storage_path(folder) / METADATA_FILE
    try:
        content = json.loads(_read(path))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path} is not JSON ({error}); fit the router again") from error
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        raise DataError(
            f"{path}: schema version {version}, this release reads {SCHEMA_VERSION}; fit the router again, "
            "or use the release of citer_ray that wrote it"
        )
    try:
        return RouterMetadata.model_validate(content)
    except ValidationError as error:
        raise DataError(f"{path} does not describe a router: {error}; fit the router again") from error


def _read_weights(folder: Path, metadata: RouterMetadata) -> bytes:
    """The weights' file, checked against the metadata."""
    data = _read(folder / WEIGHTS_FILE)
    if metadata.weights_sha256 is not None and hashlib.sha256(data).hexdigest() != metadata.weights_sha256:
        raise DataError(
            f"{folder / WEIGHTS_FILE} is not the file that {METADATA_FILE} was written for (a save was "
            "cut, or a file was copied alone); fit the router again"
        )
    return data


def _read(path: Path) -> bytes:
    try:
        with store_errors(path, "cannot read"):
            return path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(
            f"{path} is missing; a router's folder holds {WEIGHTS_FILE} and {METADATA_FILE} (citer fit writes them)"
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
