"""Fingerprints: short digests that tell whether two models, or two tokenizers, are the same.

Fed by a checkpoint's files; written into label manifests and `router.json`, so that labels and routers of another pair
are refused. A fingerprint depends on the config and on every tensor's name, dtype, shape and bytes, and neither on the
folder nor on the number of shards.

Checkpoints of less than 1 GiB are read whole. Of larger ones, eight ranges of 4 KiB spread evenly over each tensor
are read: a few MB instead of 140 GB. A change that touches less than that of one tensor (a single new token's row) can
go unseen there; training changes tensors everywhere.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from transformers import PreTrainedTokenizerBase

from citer_ray.config import ModelConfig, PairConfig
from citer_ray.errors import PairError
from citer_ray.fingerprint import PairFingerprint
from citer_ray.pair.models import load_tokenizer, resolve_path
from citer_ray.pair.tokenizer_check import merge_rules, tokens_by_id

WHOLE_BELOW_BYTES = 1 << 30
_RANGES = 8
_RANGE_BYTES = 4096
_CHUNK_BYTES = 1 << 20
_MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors format
# Keys of config.json that say how the checkpoint was written or is run, not what it computes.
_VOLATILE_KEYS = frozenset(
    (
        "_name_or_path",
        "_attn_implementation",
        "architectures",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "use_cache",
    )
)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Where one tensor lies: `[start, end)` in bytes of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int


def pair_fingerprint(pair: PairConfig) -> PairFingerprint:
    """Digest both models, and the tokenizer that they share.

    Raises:
        PairError: a model's files are not on this machine, or cannot be read.
    """
    return PairFingerprint(
        slm=model_fingerprint(pair.slm),
        llm=model_fingerprint(pair.llm),
        tokenizer=tokenizer_fingerprint(load_tokenizer(pair.slm)),
    )


def model_fingerprint(model: ModelConfig) -> str:
    """Digest the model that a config names."""
    return fingerprint(resolve_path(model), model.revision)


def fingerprint(path_or_name: str | Path, revision: str | None = None) -> str:
    """Digest a model's config and weights.

    Args:
        path_or_name: a checkpoint folder, or a hub name; of a hub name, the files in the local cache are read.
        revision: branch, tag or commit of a hub name.

    Raises:
        PairError: no such files on this machine, or files that are no safetensors.
    """
    folder = _local_folder(path_or_name, revision)
    digest = _new_digest()
    _update(digest, _config_text(folder))
    tensors = sorted(_tensors(folder), key=lambda tensor: tensor.name)
    whole = sum(tensor.end - tensor.start for tensor in tensors) < WHOLE_BELOW_BYTES
    for tensor in tensors:
        _update(digest, json.dumps([tensor.name, tensor.dtype, tensor.shape]))
        _update_bytes(digest, tensor, whole=whole)
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest what turns text into ids: vocabulary, merges, special tokens, and the chat template."""
    digest = _new_digest()
    special = [tokenizer.bos_token, tokenizer.eos_token]
    parts = [list(tokens_by_id(tokenizer).items()), merge_rules(tokenizer), special, tokenizer.chat_template]
    for part in parts:
        _update(digest, json.dumps(part, sort_keys=True))
    return digest.hexdigest()


def _local_folder(path_or_name: str | Path, revision: str | None) -> Path:
    folder = Path(path_or_name).expanduser()
    if folder.is_dir():
        return folder
    try:
        snapshot = snapshot_download(str(path_or_name), revision=revision, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise PairError(
            f"{path_or_name} is neither a folder nor in the hub cache of this machine; load the model once, "
            f"or run `hf download {path_or_name}`"
        ) from error
    return Path(snapshot)


def _config_text(folder: Path) -> str:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PairError(f"cannot read {folder / 'config.json'}: {error}; is this folder a checkpoint?") from error
    return json.dumps({key: config[key] for key in config.keys() - _VOLATILE_KEYS}, sort_keys=True)


def _tensors(folder: Path) -> Iterator[_Tensor]:
    """Read the headers of all weight files."""
    for file in _weight_files(folder):
        header, data_start = _header(file)
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                yield _Tensor(name, entry["dtype"], tuple(entry["shape"]), file, data_start + start, data_start + end)


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers would load; some repositories hold a second copy in another layout."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise PairError(f"{folder} lacks {len(missing)} of {len(files)} weight files, first {missing[0]}")
        return files
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise PairError(f"{folder} holds no *.safetensors, so there is nothing to take a fingerprint of")
    return files


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """Return a safetensors header, and the position of the first tensor's first byte."""
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER_BYTES + 1
        if length > _MAX_HEADER_BYTES:
            raise PairError(f"{file} is no safetensors file, or was cut off; copy or download it again")
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
        except ValueError as error:
            raise PairError(f"the header of {file} is damaged ({error}); copy or download it again") from error
    return header, 8 + length


def _update_bytes(digest: hashlib.blake2b, tensor: _Tensor, *, whole: bool) -> None:
    size = tensor.end - tensor.start
    with tensor.file.open("rb") as stream:
        if whole or size <= _RANGES * _RANGE_BYTES:
            stream.seek(tensor.start)
            _update_stream(digest, stream, size, tensor.file)
            return
        for index in range(_RANGES):
            stream.seek(tensor.start + (size - _RANGE_BYTES) * index // (_RANGES - 1))
            _update_stream(digest, stream, _RANGE_BYTES, tensor.file)


def _update_stream(digest: hashlib.blake2b, stream: Any, size: int, file: Path) -> None:
    while size > 0:
        chunk = stream.read(min(size, _CHUNK_BYTES))
        if not chunk:
            raise PairError(f"{file} ends before its last tensor; copy or download it again")
        digest.update(chunk)
        size -= len(chunk)


def _new_digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)


def _update(digest: hashlib.blake2b, text: str) -> None:
    """Add text with its length, so that no two sequences of parts run together."""
    data = text.encode("utf-8", errors="surrogatepass")
    digest.update(struct.pack("<Q", len(data)))
    digest.update(data)
