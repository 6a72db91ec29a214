"""Labels from labels, without a model: CITER-S from any round, and how many labels changed between rounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from citer_ray.config import CollectConfig
from citer_ray.label_rows import rows_to_table
from citer_ray.label_store import LabelStore, hidden_size_of
from citer_ray.label_transport import rows_from_table
from citer_ray.labels import shortcut_labels


def citer_s_settings(settings: CollectConfig) -> CollectConfig:
    """The labelling of CITER-S: no long-term reward, the SLM where both are wrong (CITER, ablation)."""
    return settings.model_copy(update={"both_wrong": "slm", "branches": "none", "shortcut": True})


def write_citer_s(source: LabelStore, target: LabelStore, settings: CollectConfig) -> None:
    """Write the CITER-S labels of the same examples: cases decide everything, so nothing is decoded."""
    settings = citer_s_settings(settings)
    done = set(target.done_chunks())
    for chunk, table in zip(source.done_chunks(), source.tables(), strict=True):
        if chunk in done:
            continue
        rows = []
        for row in rows_from_table(table):
            label_T = shortcut_labels(np.asarray(row.case, np.int8), settings)
            rows.append(replace(row, label=label_T.tolist(), rollouts=0, rollout_tokens=0))
        target.write_chunk(chunk, rows_to_table(rows, hidden_size_of(table)))


def count_flips(before: LabelStore, after: LabelStore) -> int:
    """Positions whose preference (label at least 0.5) differs between two label sets of the same examples."""
    flips = 0
    for old, new in zip(_labels(before), _labels(after), strict=True):
        known = ~(np.isnan(old) | np.isnan(new))
        flips += int(np.sum((old[known] >= 0.5) != (new[known] >= 0.5)))
    return flips


def _labels(store: LabelStore) -> Iterator[npt.NDArray[np.float64]]:
    for table in store.tables(["label"]):
        yield table["label"].combine_chunks().flatten().to_numpy(zero_copy_only=False).astype(np.float64)
