"""Labelling chunks of examples with engines: two forward passes, then rollouts where the outcome decides.

Three steps that the collection's worker pools run one after the other on each chunk: `score_slm`, `score_llm`,
`decide`. A later round starts from the first round's rows and runs `decide` alone, with the last round's policy.
No Ray in here: `on_ray/collect.py` moves chunks between processes.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from citer_ray.answers import grade
from citer_ray.config import CollectConfig
from citer_ray.decoding import Request, decode_many
from citer_ray.engine import Engine, Sampling, TokenSequence
from citer_ray.examples import Example
from citer_ray.label_rows import LabelRow
from citer_ray.labels import (
    Case,
    Outcomes,
    classify,
    outcome_label,
    rollout_positions,
    same_branch_labels,
    shortcut_labels,
)
from citer_ray.policy import Policy, Writer
from citer_ray.prompts import PromptFormat

_NO_TOKEN = -1  # where the LLM was not asked


@dataclass(frozen=True, slots=True)
class _Branch:
    """One rollout to decode: a row's position, the model whose token comes first, and the sample's number."""

    row: int
    position: int
    first: Writer
    sample: int


class Labeller:
    """The labelling of one round.

    Args:
        tokenizer: the pair's tokenizer.
        prompt: how examples become prompts.
        settings: the labelling.
        seed: of sampled positions and rollouts.
        eos_token_id: ends a reference.
        eos_token_ids: all ids that end a response.
        round: number of the round, from 1.
        policy: the policy that rollouts follow.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: PromptFormat,
        settings: CollectConfig,
        *,
        seed: int,
        eos_token_id: int,
        eos_token_ids: frozenset[int],
        round: int,
        policy: Policy,
    ) -> None:
        self._tokenizer, self._prompt, self._settings, self._seed = tokenizer, prompt, settings, seed
        self._eos_token_id, self._eos_token_ids = eos_token_id, eos_token_ids
        self._round, self._policy = round, policy

    async def score_slm(self, slm: Engine, examples: Sequence[Example], chunk: int) -> list[LabelRow]:
        """Rows with the SLM's greedy tokens and hidden states; cases are provisional, labels are empty."""
        sequences = [
            TokenSequence(
                self._prompt.encode_prompt(example, self._tokenizer),
                self._prompt.encode_reference(example, self._tokenizer, self._eos_token_id),
            )
            for example in examples
        ]
        rows = []
        for example, sequence, scores in zip(examples, sequences, await slm.score(sequences, hidden=True), strict=True):
            assert scores.hidden is not None
            unknown = [_NO_TOKEN] * len(sequence.response_ids)
            rows.append(
                LabelRow(
                    example_id=example.id,
                    prompt_ids=sequence.prompt_ids,
                    reference_ids=sequence.response_ids,
                    slm_ids=scores.greedy.tolist(),
                    llm_ids=[None] * len(sequence.response_ids),
                    case=classify(scores.greedy, unknown, sequence.response_ids).tolist(),
                    label=[None] * len(sequence.response_ids),
                    hidden=scores.hidden,
                    round=self._round,
                    rollouts=0,
                    rollout_tokens=0,
                    chunk=chunk,
                )
            )
        return rows

    async def score_llm(self, llm: Engine, rows: Sequence[LabelRow]) -> list[LabelRow]:
        """The rows with the LLM's greedy tokens where they are needed, and final cases."""
        everywhere = not self._settings.shortcut and self._settings.branches != "none"
        needed = [everywhere or Case.BOTH_WRONG in row.case for row in rows]
        sequences = [
            TokenSequence(row.prompt_ids, row.reference_ids) for row, need in zip(rows, needed, strict=True) if need
        ]
        scored = iter(await llm.score(sequences))
        done = []
        for row, need in zip(rows, needed, strict=True):
            if not need:
                done.append(row)
                continue
            greedy = next(scored).greedy
            wanted = np.asarray(row.slm_ids) != np.asarray(row.reference_ids)
            llm_ids = [int(t) if everywhere or w else None for t, w in zip(greedy, wanted, strict=True)]
            case = classify(row.slm_ids, greedy, row.reference_ids)
            done.append(replace(row, llm_ids=llm_ids, case=case.tolist()))
        return done

    async def decide(
        self,
        slm: Engine | None,
        llm: Engine | None,
        rows: Sequence[LabelRow],
        examples: Mapping[str, Example],
    ) -> list[LabelRow]:
        """The rows with their labels.

        Args:
            slm: needed where rollouts decide.
            llm: needed where the policy asks it.
            rows: rows with final cases, of one chunk.
            examples: by id, for grading.
        """
        labels = [shortcut_labels(np.asarray(row.case, np.int8), self._settings) for row in rows]
        branches: list[_Branch] = []
        for index, row in enumerate(rows):
            chosen = self._chosen(row)
            llm_ids = [_NO_TOKEN if token is None else token for token in row.llm_ids]
            labels[index][same_branch_labels(row.slm_ids, llm_ids, self._settings, chosen)] = 1
            if self._settings.both_wrong == "slm":
                continue
            case = np.asarray(row.case, np.int8)
            for position in rollout_positions(case, row.slm_ids, llm_ids, self._settings, chosen):
                branches.extend(self._branches(index, int(position)))
        right, tokens = await self._roll_out(slm, llm, rows, examples, branches)
        outcomes: dict[tuple[int, int], dict[Writer, list[bool]]] = {}
        written = np.zeros(len(rows), np.int64)
        counts = np.zeros(len(rows), np.int64)
        for branch, is_right, count in zip(branches, right, tokens, strict=True):
            found = outcomes.setdefault((branch.row, branch.position), {Writer.SLM: [], Writer.LLM: []})
            found[branch.first].append(is_right)
            written[branch.row] += count
            counts[branch.row] += 1
        for (index, position), found in outcomes.items():
            graded = Outcomes(found[Writer.SLM], found[Writer.LLM] or None)
            labels[index][position] = outcome_label(graded, self._settings.llm_price)
        return [
            replace(
                row,
                label=[None if np.isnan(value) else float(value) for value in label],
                round=self._round,
                rollouts=int(count),
                rollout_tokens=int(total),
            )
            for row, label, count, total in zip(rows, labels, counts, written, strict=True)
        ]

    def _chosen(self, row: LabelRow) -> npt.NDArray[np.bool_]:
        """The sampled positions of a row: a function of the seed and the example's id."""
        key = np.array([self._seed % 2**64, zlib.crc32(row.example_id.encode())], np.uint64)
        draws = np.random.Generator(np.random.Philox(key=key)).random(len(row.case))
        return draws < self._settings.state_fraction

    def _branches(self, row: int, position: int) -> list[_Branch]:
        firsts = [Writer.SLM] if self._settings.branches == "none" else [Writer.SLM, Writer.LLM]
        return [
            _Branch(row, position, first, sample)
            for first in firsts
            for sample in range(self._settings.rollouts_per_state)
        ]

    async def _roll_out(
        self,
        slm: Engine | None,
        llm: Engine | None,
        rows: Sequence[LabelRow],
        examples: Mapping[str, Example],
        branches: Sequence[_Branch],
    ) -> tuple[list[bool], list[int]]:
        """For every branch: is the final answer right, and how many tokens were written after its first."""
        limit = min([engine.max_model_len for engine in (slm, llm) if engine is not None], default=0)
        starts = [self._start(rows[branch.row], branch) for branch in branches]
        responses = [list(start) for start in starts]
        requests, decoded = [], []
        for index, (branch, start) in enumerate(zip(branches, starts, strict=True)):
            context = [*rows[branch.row].prompt_ids, *start]
            room = min(self._settings.max_new_tokens, limit - len(context))
            if start[-1] in self._eos_token_ids or room < 1:
                continue
            sampling = self._sampling(rows[branch.row], branch)
            requests.append(Request(context, self._policy, room, sampling))
            decoded.append(index)
        traces = await decode_many(slm, llm, requests, in_flight=self._settings.rollouts_in_flight)
        tokens = [0] * len(branches)
        for index, trace in zip(decoded, traces, strict=True):
            responses[index] += trace.token_ids
            tokens[index] = len(trace.token_ids)
        right = [
            self._is_right(response, examples[rows[branch.row].example_id])
            for branch, response in zip(branches, responses, strict=True)
        ]
        return right, tokens

    @staticmethod
    def _start(row: LabelRow, branch: _Branch) -> list[int]:
        """The response so far: the reference before the position, and the branch's first token."""
        first = row.slm_ids[branch.position] if branch.first is Writer.SLM else row.llm_ids[branch.position]
        assert first is not None, "an LLM branch needs the LLM's token"
        return [*row.reference_ids[: branch.position], first]

    def _sampling(self, row: LabelRow, branch: _Branch) -> Sampling:
        if self._settings.rollouts_per_state == 1:
            return Sampling()
        name = f"{self._seed}/{row.example_id}/{branch.position}/{branch.first}/{branch.sample}"
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
        return Sampling(temperature=self._settings.temperature, seed=seed)

    def _is_right(self, response_ids: Sequence[int], example: Example) -> bool:
        """Grade the response alone, cut at its first EOS."""
        text = response_text(response_ids, self._tokenizer, self._eos_token_ids)
        return grade(text, example).correct


def response_text(response_ids: Sequence[int], tokenizer: Any, eos_token_ids: frozenset[int]) -> str:
    """The text of a response up to its first EOS; what follows never counts."""
    end = next((i for i, token in enumerate(response_ids) if token in eos_token_ids), len(response_ids))
    return str(tokenizer.decode(list(response_ids[:end]), skip_special_tokens=True))
