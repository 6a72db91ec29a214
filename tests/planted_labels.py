"""Labels of a planted rule, for tests of fitting: a linear function of the hidden state, with noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from citer_ray.fingerprint import PairFingerprint
from citer_ray.label_rows import LabelRow, rows_to_table
from citer_ray.label_store import LabelManifest, LabelStore

HIDDEN_SIZE = 6


def write_planted_labels(
    folder: Path, *, examples: int = 48, per_chunk: int = 8, positions: tuple[int, int] = (5, 20), seed: int = 0
) -> LabelStore:
    """A complete label store; about 7 of 10 labels are 1, some are soft, and some positions have none."""
    rng = np.random.default_rng(seed)
    rule_H = np.array([2.0, -1.5, 1.0, 0.0, 0.0, 0.5])
    store = LabelStore.open(folder, digest=f"planted-{seed}")
    total = 0
    for chunk in range(-(-examples // per_chunk)):
        rows = []
        for index in range(chunk * per_chunk, min((chunk + 1) * per_chunk, examples)):
            length = int(rng.integers(*positions))
            hidden_TH = rng.normal(1.0, 2.0, (length, HIDDEN_SIZE))
            logit_T = hidden_TH @ rule_H
            label_T = (rng.random(length) < 1 / (1 + np.exp(-logit_T))).astype(float)
            label_T[rng.random(length) < 0.05] = 0.25
            rows.append(
                LabelRow(
                    example_id=f"planted-{index}",
                    prompt_ids=[1, 2],
                    reference_ids=[3] * length,
                    slm_ids=[3] * length,
                    llm_ids=[None] * length,
                    case=rng.integers(0, 3, length).tolist(),
                    label=[None if rng.random() < 0.1 else float(label) for label in label_T],
                    hidden=hidden_TH,
                    round=1,
                    rollouts=0,
                    rollout_tokens=0,
                    chunk=chunk,
                )
            )
            total += length
        store.write_chunk(chunk, rows_to_table(rows, HIDDEN_SIZE))
    store.write_manifest(
        LabelManifest(
            fingerprint=PairFingerprint(slm="slm", llm="llm", tokenizer="tokenizer"),
            hidden_size=HIDDEN_SIZE,
            config_digest=f"planted-{seed}",
            data_digest=f"planted-{seed}-{examples}",
            round=1,
            examples=examples,
            positions=total,
            cases={},
            labels=total,
            slm_labels=0.0,
            tokens=total,
            tokens_per_second=1.0,
            rollouts=0,
            rollout_tokens=0,
            quarantined=0,
        )
    )
    return store
