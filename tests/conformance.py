"""The suite that every engine must pass: subclass `EngineConformance` and provide its two fixtures.

`model` is a transformers model with the same weights, for naive references; `engine` is the engine under test, built
with `EOS_ID` as its only end-of-sequence id and `HashScorer` (or the equivalent router) under the name `"router"`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from citer_ray.engine import Engine, Finish, Sampling, SpeculativeEngine, TokenSequence, Turn
from tests.conftest import EOS_ID, VOCAB_SIZE

GREEDY = Sampling()
FREE = Sampling(ignore_eos=True)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of 2 to 20 ids without special ones; some share a prefix."""
    generator = np.random.default_rng(seed)
    made: list[list[int]] = []
    for index in range(count):
        start = made[-1][:12] if index % 3 == 2 else []
        made.append(start + generator.integers(3, VOCAB_SIZE, generator.integers(2, 20)).tolist())
    return made


def naive_generate(model: PreTrainedModel, ids: Sequence[int], count: int, *, stop_at_eos: bool) -> list[int]:
    """Greedy tokens by a full forward pass each, without any cache."""
    context, written = list(ids), []
    while len(written) < count:
        with torch.inference_mode():
            token = int(model(torch.tensor([context])).logits[0, -1].argmax())
        context.append(token)
        written.append(token)
        if stop_at_eos and token == EOS_ID:
            break
    return written


async def decode_in_turns(engine: Engine, prompt: Sequence[int], sizes: Sequence[int], sampling: Sampling) -> list[int]:
    """Tokens of one session over several turns, by the contract's bookkeeping."""
    ids = list(prompt)
    session = await engine.open(prompt, sampling)
    for size in sizes:
        ids += (await session.turn(ids[session.num_tokens :], size)).token_ids
    await session.close()
    return ids[len(prompt) :]


class EngineConformance:
    """See the module's docstring."""

    @pytest.fixture
    def masked_ids(self) -> list[int]:
        """Ids that the engine under test never writes."""
        return []

    async def test_scores_equal_a_full_forward_pass(
        self, engine: Engine, model: PreTrainedModel, masked_ids: list[int]
    ) -> None:
        batch = [TokenSequence(prompt, response) for prompt, response in zip(prompts(9), prompts(9, 1), strict=True)]
        for sequence, scores in zip(batch, await engine.score(batch, hidden=True), strict=True):
            ids = torch.tensor([[*sequence.prompt_ids, *sequence.response_ids]])
            with torch.inference_mode():
                output = model(ids, output_hidden_states=True)
            states = slice(len(sequence.prompt_ids) - 1, -1)
            logits = output.logits[0, states].clone()
            logits[:, masked_ids] = -torch.inf
            assert scores.greedy.tolist() == logits.argmax(-1).tolist()
            expected = logits.log_softmax(-1).gather(1, torch.tensor(sequence.response_ids)[:, None])[:, 0]
            np.testing.assert_allclose(scores.reference_logprob, expected.numpy(), atol=2e-4)
            assert scores.hidden is not None
            np.testing.assert_allclose(scores.hidden, output.hidden_states[-1][0, states].numpy(), atol=2e-4)

    async def test_greedy_turn_equals_naive_generation(self, engine: Engine, model: PreTrainedModel) -> None:
        for prompt in prompts(4):
            session = await engine.open(prompt, GREEDY)
            turn = await session.turn([], 24)
            await session.close()
            assert turn.token_ids == naive_generate(model, prompt, 24, stop_at_eos=True)
            assert len(turn.logprobs) == len(turn.token_ids) and turn.scores == []
            ended = turn.token_ids[-1] == EOS_ID
            assert turn.finish is (Finish.EOS if ended else Finish.LENGTH)

    async def test_logprobs_are_those_of_the_distribution(self, engine: Engine, model: PreTrainedModel) -> None:
        prompt = prompts(1)[0]
        session = await engine.open(prompt, FREE)
        turn = await session.turn([], 8)
        await session.close()
        (scores,) = await engine.score([TokenSequence(prompt, turn.token_ids)])
        np.testing.assert_allclose(turn.logprobs, scores.reference_logprob, atol=2e-4)

    @pytest.mark.parametrize("sizes", [[12], [1] * 12, [5, 1, 6], [11, 1]])
    @pytest.mark.parametrize("sampling", [FREE, Sampling(temperature=0.8, top_p=0.9, seed=5, ignore_eos=True)])
    async def test_turns_do_not_change_the_tokens(self, engine: Engine, sizes: list[int], sampling: Sampling) -> None:
        prompt = prompts(1, 7)[0]
        whole = await decode_in_turns(engine, prompt, [12], sampling)
        assert await decode_in_turns(engine, prompt, sizes, sampling) == whole

    @pytest.mark.parametrize("sizes", [[10], [4, 1, 5]])
    async def test_penalties_count_the_response_alone(
        self, engine: Engine, model: PreTrainedModel, sizes: list[int]
    ) -> None:
        prompt = prompts(1, 7)[0]
        ids, start = list(prompt), len(prompt) - 2  # the last two ids of the context belong to the response
        for _ in range(sum(sizes)):
            with torch.inference_mode():
                logits = model(torch.tensor([ids])).logits[0, -1].double().numpy().copy()
            for token in set(ids[start:]):
                logits[token] -= 1.5 - 25.0 * ids[start:].count(token)
            ids.append(int(logits.argmax()))
        sampling = Sampling(ignore_eos=True, presence_penalty=1.5, frequency_penalty=-25.0, response_start=start)
        assert await decode_in_turns(engine, prompt, sizes, sampling) == ids[len(prompt) :]
        assert ids[len(prompt) :] != await decode_in_turns(engine, prompt, sizes, FREE)

    async def test_many_sessions_at_once_equal_one_at_a_time(self, engine: Engine) -> None:
        for sampling in (FREE, Sampling(temperature=1.0, top_k=20, seed=3, ignore_eos=True)):
            many = prompts(17, 2)
            together = await asyncio.gather(*(decode_in_turns(engine, p, [3, 4, 5], sampling) for p in many))
            alone = [await decode_in_turns(engine, prompt, [12], sampling) for prompt in many]
            assert together == alone

    async def test_seeds_differ_and_repeat(self, engine: Engine) -> None:
        prompt = prompts(1)[0]

        async def draw(seed: int) -> list[int]:
            return await decode_in_turns(engine, prompt, [16], Sampling(temperature=1.5, seed=seed, ignore_eos=True))

        assert await draw(1) == await draw(1)
        assert await draw(1) != await draw(2)

    async def test_the_last_sampled_token_may_be_replaced(self, engine: Engine, model: PreTrainedModel) -> None:
        prompt = prompts(1, 3)[0]
        session = await engine.open(prompt, FREE)
        turn = await session.turn([], 4)
        assert session.num_tokens == len(prompt) + 3
        replaced = [*prompt, *turn.token_ids[:3], 50]
        after = await session.turn(replaced[session.num_tokens :], 4)
        await session.close()
        assert after.token_ids == naive_generate(model, replaced, 4, stop_at_eos=False)

    async def test_new_ids_join_the_context(self, engine: Engine, model: PreTrainedModel) -> None:
        prompt, more = prompts(2, 4)
        session = await engine.open(prompt, FREE)
        ids = prompt + (await session.turn([], 3)).token_ids + more
        turn = await session.turn(ids[session.num_tokens :], 5)
        await session.close()
        assert turn.token_ids == naive_generate(model, ids, 5, stop_at_eos=False)

    async def test_threshold_zero_never_hands_off(self, engine: Engine) -> None:
        prompt = prompts(1)[0]
        session = await engine.open(prompt, FREE, scorer="router", threshold=0.0)
        turn = await session.turn([], 10)
        await session.close()
        assert turn.finish is Finish.LENGTH
        assert len(turn.scores) == len(turn.token_ids) == 10
        assert turn.token_ids == await decode_in_turns(engine, prompt, [10], FREE)

    async def test_threshold_above_one_hands_off_at_once(self, engine: Engine) -> None:
        prompt = prompts(1)[0]
        session = await engine.open(prompt, FREE, scorer="router", threshold=1.5)
        turn = await session.turn([], 10)
        assert (turn.token_ids, turn.finish, len(turn.scores)) == ([], Finish.HANDOFF, 1)
        assert session.num_tokens == len(prompt)  # a handed-off position leaves everything in the cache
        await session.close()

    async def test_handoff_stops_where_the_score_falls_below(self, engine: Engine, model: PreTrainedModel) -> None:
        for prompt in prompts(5, 5):
            free = await self._scored(engine, prompt, 0.0)
            threshold = float(np.median(free.scores))
            turn = await self._scored(engine, prompt, threshold)
            first = next(i for i, score in enumerate(free.scores) if score < threshold)
            assert turn.finish is Finish.HANDOFF
            assert turn.token_ids == free.token_ids[:first]
            np.testing.assert_allclose(turn.scores, free.scores[: first + 1], atol=1e-4)

    @staticmethod
    async def _scored(engine: Engine, prompt: list[int], threshold: float) -> Turn:
        session = await engine.open(prompt, FREE, scorer="router", threshold=threshold)
        turn = await session.turn([], 16)
        await session.close()
        return turn

    async def test_a_session_goes_on_after_a_handoff(self, engine: Engine, model: PreTrainedModel) -> None:
        prompt = prompts(1, 6)[0]
        free = await self._scored(engine, prompt, 0.0)
        session = await engine.open(prompt, FREE, scorer="router", threshold=float(np.median(free.scores)))
        ids = list(prompt)
        for _ in range(4):
            turn = await session.turn(ids[session.num_tokens :], 16)
            ids += turn.token_ids
            assert turn.token_ids == naive_generate(
                model, ids[: len(ids) - len(turn.token_ids)], len(turn.token_ids), stop_at_eos=False
            )
            ids.append(41)  # the LLM's token
        await session.close()

    async def test_a_cancelled_turn_can_be_rebuilt(self, engine: Engine, model: PreTrainedModel) -> None:
        prompt = prompts(1)[0]
        session = await engine.open(prompt, FREE)
        task = asyncio.create_task(session.turn([], 200))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        turn = await session.turn(prompt[session.num_tokens :], 4)
        await session.close()
        assert turn.token_ids == naive_generate(model, prompt, 4, stop_at_eos=False)

    async def test_close_is_idempotent_and_final(self, engine: Engine) -> None:
        session = await engine.open(prompts(1)[0], GREEDY)
        await session.turn([], 1)
        await session.close()
        await session.close()
        with pytest.raises(ValueError, match="closed"):
            await session.turn([5], 1)

    async def test_misuse_is_refused(self, engine: Engine) -> None:
        with pytest.raises(ValueError, match="empty"):
            await engine.open([], GREEDY)
        with pytest.raises(ValueError, match=str(engine.max_model_len)):
            await engine.open([5] * (engine.max_model_len + 1), GREEDY)
        with pytest.raises(ValueError, match="no_such_scorer"):
            await engine.open([5], GREEDY, scorer="no_such_scorer")
        session = await engine.open([5, 6], FREE)
        with pytest.raises(ValueError, match="max_tokens"):
            await session.turn([], 0)
        with pytest.raises(ValueError, match=str(engine.max_model_len)):
            await session.turn([], engine.max_model_len)
        turn = await session.turn([], 1)
        with pytest.raises(ValueError, match="nothing to compute"):
            await session.turn([], 1)
        await session.turn(turn.token_ids, 1)
        await session.close()


class SpeculativeConformance:
    """What an engine must pass beyond `EngineConformance` if it drafts and verifies; the same fixtures."""

    async def test_one_pass_shows_what_follows_each_id(self, engine: SpeculativeEngine, model: PreTrainedModel) -> None:
        prompt, draft = prompts(2, 9)
        for first in (0, 4):  # ids that the session has computed already
            session = await engine.open_speculative(prompt)
            ids = [*prompt, *draft]
            if first:
                await session.turn(draft[:first], 1)
            turn = await session.turn(ids[session.num_tokens :], 1)
            await session.close()
            assert turn.distributions is not None and len(turn.distributions) == len(draft) + 1 - first - (first > 0)
            with torch.inference_mode():
                logits = model(torch.tensor([ids])).logits[0, -len(turn.distributions) :, : turn.distributions.shape[1]]
            np.testing.assert_allclose(turn.distributions, logits.log_softmax(-1).numpy(), atol=2e-4)
            assert turn.token_ids == [int(turn.distributions[-1].argmax())]

    async def test_a_draft_shows_what_its_tokens_were_picked_from(self, engine: SpeculativeEngine) -> None:
        prompt = prompts(1, 10)[0]
        session = await engine.open_speculative(prompt)
        turn = await session.turn([], 5)
        await session.close()
        assert turn.distributions is not None
        assert turn.distributions.argmax(-1).tolist() == turn.token_ids
        np.testing.assert_allclose(turn.distributions.max(-1), turn.logprobs, atol=1e-5)

    async def test_a_rewound_session_forgets(self, engine: SpeculativeEngine, model: PreTrainedModel) -> None:
        prompt, rejected = prompts(2, 11)
        others = [engine.open_speculative(other) for other in prompts(5, 12)]
        sessions = [await engine.open_speculative(prompt), *[await other for other in others]]
        await asyncio.gather(*(session.turn(rejected, 1) for session in sessions))
        keep = len(prompt) + 1
        sessions[0].rewind(keep)
        assert sessions[0].num_tokens == keep
        sessions[0].rewind(keep + 50)
        ids = [*prompt, rejected[0], 41, 42]
        turns = await asyncio.gather(
            sessions[0].turn(ids[sessions[0].num_tokens :], 3), *(session.turn([50], 3) for session in sessions[1:])
        )
        assert turns[0].token_ids == naive_generate(model, ids, len(turns[0].token_ids), stop_at_eos=True)
        with pytest.raises(ValueError, match="num_tokens"):
            sessions[0].rewind(-1)
        for session in sessions:
            await session.close()
