"""Label collection in this process without Ray, on the transformers engine: what collection on Ray must give."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from citer_ray.engines.build import build_pair
from citer_ray.examples import Example
from citer_ray.label_rows import LabelRow
from citer_ray.labelling import Labeller
from citer_ray.on_ray.collect import chunked
from citer_ray.policy import AlwaysSlm, Policy
from citer_ray.preparation import Prepared, engine_spec, load_purpose


def labels_here(prepared: Prepared, policy: Policy | None = None, router: Path | None = None) -> list[list[LabelRow]]:
    """The label rows of all chunks; by default those of the first round, whose rollouts are the SLM's."""
    config, spec = prepared.config, engine_spec(prepared)
    slm, llm = build_pair(spec, router=router)
    labeller = Labeller(
        prepared.tokenizer,
        config.prompt,
        config.collect,
        seed=config.seed,
        eos_token_id=prepared.eos_token_id,
        eos_token_ids=prepared.eos_token_ids,
        round=1,
        policy=AlwaysSlm() if policy is None else policy,
    )

    async def one(chunk: int, examples: Sequence[Example]) -> list[LabelRow]:
        rows = await labeller.score_llm(llm, await labeller.score_slm(slm, examples, chunk))
        return await labeller.decide(slm, llm, rows, {example.id: example for example in examples})

    chunks = chunked(load_purpose(prepared, "collect").examples, config.collect.examples_per_chunk)
    return [asyncio.run(one(number, chunk)) for number, chunk in enumerate(chunks)]
