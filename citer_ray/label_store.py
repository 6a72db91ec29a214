"""The folder of labels: one Parquet file for each chunk of examples, and a manifest that is written last.

The collection's workers write chunks; a chunk is done iff its file is there, so a killed collection goes on
where it stopped. The folder holds labels of one digest (configuration, data and pair) and refuses any other.
Fitting, reports and the next round read it.

    digest.json  part-00000.parquet  part-00001.parquet  ...  manifest.json
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from citer_ray.errors import DataError
from citer_ray.file_replacement import remove_orphans, replacing
from citer_ray.fingerprint import PairFingerprint
from citer_ray.label_rows import HIDDEN_SIZE_KEY, Positions, explode, label_schema
from citer_ray.storage import opened_parquet, storage_path

SCHEMA_VERSION = 1
_DIGEST_FILE = "digest.json"
_MANIFEST_FILE = "manifest.json"
_PART = re.compile(r"part-(\d{5,})\.parquet")
# Hidden states look random to a compressor: it would cost time and save nothing.
_COMPRESSED = ("prompt_ids", "reference_ids", "slm_ids", "llm_ids", "case", "label")


class LabelManifest(BaseModel):
    """What a complete collection is. Its presence says that the collection ended."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = Field(SCHEMA_VERSION, description="Version of the files' schema.")
    fingerprint: PairFingerprint = Field(description="The pair that the labels belong to.")
    hidden_size: int = Field(ge=1, description="Width of the hidden states.")
    config_digest: str = Field(description="Digest that the folder was opened with.")
    data_digest: str = Field(description="Digest of the examples.")
    round: int = Field(ge=1, description="Round of the labels, from 1.")
    examples: int = Field(ge=0, description="Labelled examples.")
    positions: int = Field(ge=0, description="Reference positions of these examples.")
    cases: dict[str, int] = Field(description="Positions of each case, by its lower-case name.")
    labels: int = Field(ge=0, description="Positions that have a label.")
    slm_labels: float = Field(ge=0, description="Sum of the labels: positions that prefer the SLM.")
    tokens: int = Field(ge=0, description="Tokens scored and decoded, all models together.")
    tokens_per_second: float = Field(ge=0, description="`tokens` over the collection's wall time.")
    rollouts: int = Field(ge=0, description="Rollouts decoded.")
    rollout_tokens: int = Field(ge=0, description="Tokens that rollouts wrote.")
    quarantined: int = Field(ge=0, description="Examples set aside.")

    def digest(self) -> str:
        """SHA-256 of everything but the speed: equal for equal label sets."""
        content = self.model_dump(mode="json", exclude={"tokens_per_second"})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class LabelStore:
    """One folder of labels. Making one touches nothing; `open` checks and prepares the folder."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = storage_path(folder)

    @classmethod
    def open(cls, folder: Path | str, *, digest: str) -> LabelStore:
        """Open a folder for labels of `digest`, making it if needed. The driver calls it, before anyone
        writes.

        Removes temporary files that a killed writer left.

        Raises:
            DataError: the folder holds labels of another digest, or of an unknown origin.
        """
        store = cls(folder)
        found = store.digest()
        if found is None and (store.done_chunks() or store.is_complete()):
            raise DataError(
                f"{store.folder} holds labels but no {_DIGEST_FILE}, so their origin is unknown; delete "
                "the folder or set another output_dir"
            )
        if found is not None and found != digest:
            raise DataError(
                f"{store.folder} holds labels of another configuration, data or pair (digest {found}, this "
                f"run has {digest}); set another output_dir, or delete the folder to collect again"
            )
        remove_orphans(store.folder, "part-")
        if found is None:
            _write_json(store.folder / _DIGEST_FILE, {"schema_version": SCHEMA_VERSION, "digest": digest})
        return store

    def digest(self) -> str | None:
        """The digest that the folder was opened with, or None for a new folder."""
        path = self.folder / _DIGEST_FILE
        if not path.exists():
            return None
        content = _read_json(path)
        if content.get("schema_version") != SCHEMA_VERSION:
            raise DataError(
                f"{path}: schema version {content.get('schema_version')}, this release reads "
                f"{SCHEMA_VERSION}; collect the labels again into a new folder"
            )
        return str(content.get("digest"))

    def part(self, chunk: int) -> Path:
        """The file of a chunk."""
        return self.folder / f"part-{chunk:05d}.parquet"

    def done_chunks(self) -> list[int]:
        """Numbers of the chunks that are written, ascending."""
        if not self.folder.is_dir():
            return []
        matches = (_PART.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match.group(1)) for match in matches if match)

    def parts(self) -> list[Path]:
        """The label files, by ascending chunk."""
        return [self.part(chunk) for chunk in self.done_chunks()]

    def write_chunk(self, chunk: int, table: pa.Table) -> Path:
        """Write one chunk's rows in one step; safe beside other writers of other chunks.

        Raises:
            DataError: the table is not in the schema of `label_schema`, or the disk is full.
        """
        expected = label_schema(hidden_size_of(table))
        if not table.schema.equals(expected):
            raise DataError(f"chunk {chunk} is not in the label schema; expected\n{expected}\ngot\n{table.schema}")
        with replacing(self.part(chunk)) as temporary:
            pq.write_table(
                table,
                temporary,
                use_dictionary=False,
                compression={name: "zstd" if name in _COMPRESSED else "none" for name in table.column_names},
                write_statistics=["example_id", "round", "chunk"],
            )
        return self.part(chunk)

    def is_complete(self) -> bool:
        """Whether the manifest is there."""
        return (self.folder / _MANIFEST_FILE).exists()

    def write_manifest(self, manifest: LabelManifest) -> None:
        """Declare the collection complete."""
        _write_json(self.folder / _MANIFEST_FILE, manifest.model_dump(mode="json"))

    def read_manifest(self) -> LabelManifest:
        """The manifest of a complete collection.

        Raises:
            DataError: the collection is not complete, or the manifest cannot be read.
        """
        path = self.folder / _MANIFEST_FILE
        if not path.exists():
            raise DataError(f"{self.folder} holds no complete labels ({_MANIFEST_FILE} is missing); run collect first")
        content = _read_json(path)
        if content.get("schema_version") != SCHEMA_VERSION:
            raise DataError(
                f"{path}: schema version {content.get('schema_version')}, this release reads "
                f"{SCHEMA_VERSION}; collect the labels again into a new folder"
            )
        try:
            return LabelManifest.model_validate(content)
        except ValidationError as error:
            raise DataError(f"{path} is not a label manifest: {error}") from error

    def tables(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """The rows of one file after the other, by chunk."""
        for path in self.parts():
            yield read_part(path, columns)

    def read_rows(self, columns: Sequence[str] | None = None) -> pa.Table:
        """All rows at once; leave `hidden` out of `columns` unless it fits into memory."""
        tables = list(self.tables(columns))
        if not tables:
            raise DataError(f"{self.folder} holds no labels; run collect first")
        return pa.concat_tables(tables)

    def positions(self, *, labelled_only: bool = True) -> Iterator[tuple[pa.Table, Positions]]:
        """For each file its rows without hidden states, and its positions (`row_B` counts in that file)."""
        for table in self.tables():
            positions = explode(table, hidden_size_of(table))
            if labelled_only:
                positions = positions.select(~np.isnan(positions.label_B))
            yield table.drop_columns(["hidden"]), positions


def hidden_size_of(table: pa.Table) -> int:
    """The width of the hidden states, from the schema's metadata."""
    value = (table.schema.metadata or {}).get(HIDDEN_SIZE_KEY)
    if value is None:
        raise DataError("the table's schema does not say hidden_size; build it with rows_to_table")
    return int(value)


def read_part(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read one label file.

    Raises:
        DataError: the file is damaged.
    """
    try:
        # Not pq.read_table: that goes through a data set and would read partitions from the folder's names.
        with opened_parquet(path) as file:
            return file.read(columns=None if columns is None else list(columns))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read ({error}); delete this file and run collect again") from error


def _read_json(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}); delete the folder and run collect again") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} does not hold a JSON object; delete the folder and run collect again")
    return content


def _write_json(path: Path, content: dict[str, object]) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
