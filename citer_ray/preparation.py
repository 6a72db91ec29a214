"""What every job does before it works: check the pair, load the examples, set bad ones aside.

All of it is cheap and happens before any weights load, so that a mistake in the configuration costs seconds. The jobs
and `on_ray/` take the `Prepared` that comes out of it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from citer_ray.config import CiterConfig
from citer_ray.engines.build import EngineSpec, check_engines
from citer_ray.errors import ConfigError, DataError, PairError
from citer_ray.example_mixture import load_mixture
from citer_ray.examples import Example, LoadedExamples, QuarantinedRow, load_examples, split_examples
from citer_ray.file_replacement import replacing
from citer_ray.fingerprint import PairFingerprint
from citer_ray.pair.check import PairInfo, check_pair
from citer_ray.pair.fingerprint import pair_fingerprint
from citer_ray.pair.models import load_tokenizer
from citer_ray.prompts import check_lengths
from citer_ray.storage import check_writable, storage_path
from citer_ray.workspace import Workspace

logger = logging.getLogger(__name__)

Purpose = Literal["collect", "validation", "test"]


@dataclass(frozen=True)
class Prepared:
    """A run that may begin.

    Attributes:
        config: the configuration.
        workspace: its folder.
        info: what the pair check found.
        fingerprint: which pair it is.
        tokenizer: the pair's tokenizer.
        eos_token_id: the id that ends a reference.
    """

    config: CiterConfig
    workspace: Workspace
    info: PairInfo
    fingerprint: PairFingerprint
    tokenizer: Any
    eos_token_id: int

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """All ids that end a response, of either model: it ends alike whoever writes its EOS."""
        return frozenset(self.info.eos_token_ids)

    @property
    def max_model_len(self) -> int:
        """Tokens that both models can hold, prompt and response together."""
        return self.info.context_length


def prepare(config: CiterConfig) -> Prepared:
    """Check the pair of a configuration.

    Raises:
        PairError: the models do not belong together or cannot be found.
        ConfigError: the output folder cannot be written.
    """
    workspace = Workspace(storage_path(config.output_dir))
    try:
        check_writable(workspace.root)
    except (OSError, DataError) as error:
        raise ConfigError(f"output_dir {config.output_dir} cannot be written: {error}; set another one") from error
    info = check_pair(config.pair)
    tokenizer = load_tokenizer(config.pair.slm)
    if tokenizer.eos_token_id is None:
        raise PairError(f"the tokenizer of {config.pair.slm.path} has no EOS token, so no reference could end")
    for warning in info.warnings:
        logger.warning("pair: %s", warning)
    fingerprint = pair_fingerprint(config.pair)
    return Prepared(config, workspace, info, fingerprint, tokenizer, int(tokenizer.eos_token_id))


def load_purpose(prepared: Prepared, purpose: Purpose) -> LoadedExamples:
    """The examples for labels, for choosing thresholds, or for reported numbers; bad ones go to `quarantine/`.

    Raises:
        ConfigError: the configuration names no source for them.
        DataError: no usable example is left.
    """
    data = prepared.config.data
    if data.validation is None and purpose != "test":
        loaded = _load(prepared, "collect")
        rest, held_out = split_examples(loaded.examples, data.validation_fraction, prepared.config.seed)
        if not held_out or not rest:
            raise DataError(
                f"{len(loaded)} examples cannot be split into labels and validation at "
                f"data.validation_fraction {data.validation_fraction}; give more examples or set data.validation"
            )
        return LoadedExamples(held_out) if purpose == "validation" else LoadedExamples(rest, loaded.quarantined)
    return _load(prepared, purpose)


def _load(prepared: Prepared, purpose: Purpose) -> LoadedExamples:
    data = prepared.config.data
    sources, split, limit = {
        "collect": (data.collect, data.collect_split, data.collect_limit),
        "validation": (data.validation, data.validation_split, data.validation_limit),
        "test": (data.test, data.test_split, data.test_limit),
    }[purpose]
    if sources is None:
        raise ConfigError(f"data.{purpose} is null; set it to a source of examples")

    def load(source: str, limit: int | None) -> LoadedExamples:
        return load_examples(
            source,
            task=data.task,
            split=split,
            limit=limit,
            on_error=data.on_bad_row,
            require_reference=purpose == "collect",
            # Held-out families are for the test: labels and thresholds come from the chosen ones.
            families=data.families if source.startswith("embedded:") and purpose != "test" else None,
        )

    sources = (sources,) if isinstance(sources, str) else sources
    return _fitting(prepared, load_mixture(sources, limit, load), purpose)


def _fitting(prepared: Prepared, loaded: LoadedExamples, purpose: Purpose) -> LoadedExamples:
    """The examples that fit the context; the others join the quarantine."""
    collecting = purpose == "collect"
    checked = check_lengths(
        loaded.examples,
        prepared.config.prompt,
        prepared.tokenizer,
        context_length=prepared.max_model_len,
        eos_token_id=prepared.eos_token_id if collecting else None,
        # Rollouts are cut at the context's end; a response that is graded gets its full length.
        max_new_tokens=0 if collecting else prepared.config.evaluate.max_new_tokens,
    )
    quarantined = (*loaded.quarantined, *checked.quarantined)
    path = prepared.workspace.quarantine(purpose)
    write_quarantine(path, quarantined)
    if quarantined:
        logger.warning(
            "%d of %d %s examples are set aside (%s); the first: row %d: %s",
            len(quarantined),
            len(quarantined) + len(checked.examples),
            purpose,
            path,
            quarantined[0].row,
            quarantined[0].reason,
        )
    if not checked.examples:
        raise DataError(f"no {purpose} example can be used; the first reason: {quarantined[0].reason}")
    return LoadedExamples(checked.examples, quarantined)


def write_quarantine(path: Path, rows: Sequence[QuarantinedRow]) -> None:
    """Write the rows that were set aside; an empty list removes an old file."""
    if not rows:
        path.unlink(missing_ok=True)
        return
    with replacing(path) as temporary:
        temporary.write_text("".join(row.model_dump_json() + "\n" for row in rows), encoding="utf-8")


def examples_to_json(examples: Sequence[Example]) -> str:
    """Examples as one JSON text, for travelling between processes."""
    return json.dumps([example.model_dump(mode="json") for example in examples])


def examples_from_json(text: str) -> list[Example]:
    """The inverse of `examples_to_json`."""
    return [Example.model_validate(values) for values in json.loads(text)]


def engine_spec(prepared: Prepared) -> EngineSpec:
    """What workers need to build the pair's engines.

    Raises:
        ConfigError, PairError: the configured engine cannot run this pair.
    """
    spec = EngineSpec(
        config=prepared.config,
        shared_vocab_size=prepared.info.shared_vocab_size,
        eos_token_ids=prepared.eos_token_ids,
        max_model_len=prepared.max_model_len,
        handoff_token_id=prepared.info.handoff_token_id,
        slm_fingerprint=prepared.fingerprint.slm,
    )
    check_engines(spec)
    return spec
