"""`citer chat --slm PATH --llm-url URL`: the SLM on this machine, the LLM on a server, one answer of both.

The routed loop, the text and the counts are those of `serving/`; here they run in one process, and go to the terminal.
When the server is away, the SLM writes the rest alone, if so configured, and a note says so.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError
from rich.console import Console
from rich.text import Text

from citer_ray.calibration import CalibrationTable
from citer_ray.config import CiterConfig, DataConfig, EngineConfig, ModelConfig, PairConfig
from citer_ray.config_remote import RemoteConfig
from citer_ray.cost import ModelCost, PairCost, RouterCost
from citer_ray.engine import GREEDY, Engine
from citer_ray.engines.build import EngineSpec, build_engine
from citer_ray.engines.hf import TransformersEngine
from citer_ray.engines.remote import RemoteEngine
from citer_ray.engines.remote_client import RemoteClient
from citer_ray.errors import ConfigError
from citer_ray.pair.fingerprint import model_fingerprint
from citer_ray.pair.models import context_length, eos_token_ids, load_hf_config, load_tokenizer
from citer_ray.pair.tokenizer_check import tokens_by_id
from citer_ray.policy import Writer
from citer_ray.prompts import PromptFormat
from citer_ray.router_artifact import load_router
from citer_ray.serving.choices import Choice, Delta
from citer_ray.serving.jobs import Job, RouterRef, scorer_name
from citer_ray.serving.local import LocalBackend
from citer_ray.serving.metrics import Metrics
from citer_ray.serving.responding import LlmUnavailableError, ResponseSettings
from citer_ray.serving.usage import Tally

STYLES = {Writer.SLM: "", Writer.LLM: "bold black on bright_yellow"}
NOTE = "(the LLM's server is away: the SLM writes alone)"


@dataclass(frozen=True, slots=True)
class EdgeSettings:
    """What the command line says.

    Attributes:
        slm: folder or hub name of the SLM.
        llm_url: base URL of the LLM's server.
        llm: folder or hub name of the LLM, whose `config.json` alone is read, for gigabytes; or None.
        llm_model: its name on the server, or None for the only one.
        router: folder of the router; only for the model `routed`.
        threshold: None takes the router's own.
        llm_share: instead of a threshold.
        model: `routed`, `slm` or `llm`.
        max_tokens: of an answer.
        on_llm_unavailable: `error` or `slm`.
    """

    slm: str
    llm_url: str
    llm: str | None = None
    llm_model: str | None = None
    router: Path | None = None
    threshold: float | None = None
    llm_share: float | None = None
    model: str = "routed"
    max_tokens: int = 512
    on_llm_unavailable: str = "error"

    def check(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            ConfigError: with the option's name.
        """
        if self.model not in ("routed", "slm", "llm"):
            raise ConfigError(f"--model is {self.model!r}; it must be routed, slm or llm")
        if self.on_llm_unavailable not in ("error", "slm"):
            raise ConfigError(f"--on-llm-unavailable is {self.on_llm_unavailable!r}; it must be error or slm")
        if self.model == "routed" and self.router is None:
            raise ConfigError("a routed answer needs --router FOLDER (or use --model slm or llm)")
        if self.threshold is not None and self.llm_share is not None:
            raise ConfigError("--threshold and --llm-share exclude each other: give one of them")


class EdgeChat:
    """Answers in a terminal.

    Args:
        slm: has the scorer of the job's router.
        llm: raises `LlmUnavailableError` when it is away.
        tokenizer: of both.
        encode: from a question to the prompt's ids.
        job: what all answers share; its prompt is replaced.
        max_model_len: longest context.
        end_ids: ids that end an answer.
        cost: prices of passes, or None.
        console: where answers go.
        on_llm_unavailable: see `ResponseSettings`.
    """

    def __init__(
        self,
        slm: Engine,
        llm: Engine,
        *,
        tokenizer: Any,
        encode: Callable[[str], Sequence[int]],
        job: Job,
        max_model_len: int,
        end_ids: frozenset[int],
        cost: PairCost | None,
        console: Console,
        on_llm_unavailable: str = "error",
    ) -> None:
        self._llm, self._tokenizer, self._encode, self._job = llm, tokenizer, encode, job
        self._max_model_len, self._end_ids, self._cost, self._console = max_model_len, end_ids, cost, console
        self._backend = LocalBackend(slm, llm, ResponseSettings(on_llm_unavailable))

    async def ask(self, question: str) -> Tally:
        """Answer one question: tokens as they come, then what they cost.

        Raises:
            LlmUnavailableError: the LLM is away, and the SLM shall not write alone.
            ConfigError: the question does not fit.
        """
        prompt_ids = list(self._encode(question))
        room = self._max_model_len - len(prompt_ids)
        if room < 1:
            raise ConfigError(f"the question has {len(prompt_ids)} tokens, the pair takes {self._max_model_len}")
        limit = min(self._job.max_new_tokens, room)
        job = replace(self._job, session=secrets.token_hex(8), prompt_ids=prompt_ids, max_new_tokens=limit)
        choice = Choice(0, job, Tally(len(prompt_ids)))
        read = getattr(self._llm, "read_ids", 0)
        noted = False
        run = choice.run(self._backend, self._tokenizer, self._end_ids, Metrics())
        async with aclosing(cast(AsyncGenerator[Delta, None], run)) as deltas:
            async for delta in deltas:
                if choice.degraded and not noted:
                    noted = True
                    self._console.print(f" {NOTE} ", style="bold red", end="", markup=False, highlight=False)
                for token in delta.tokens:
                    self._console.print(Text(token.text, STYLES[token.writer]), end="", soft_wrap=True)
        self._console.print()
        if choice.degraded and not noted:
            self._console.print(NOTE, style="bold red", markup=False, highlight=False)
        self._console.print(
            self._summary(choice, getattr(self._llm, "read_ids", 0) - read), style="dim", markup=False, highlight=False
        )
        return choice.tally

    def _summary(self, choice: Choice, read: int) -> str:
        tally = choice.tally
        total = len(tally.writers)
        share = tally.llm_tokens / total if total else 0.0
        visits = f"{tally.visits} visit{'' if tally.visits == 1 else 's'}"
        parts = [
            f"{total} tokens, {tally.llm_tokens} by the LLM ({share:.1%}), {visits}",
            f"{read} ids sent to the LLM",
        ]
        if self._cost is not None and total:
            moved, alone = tally.gigabytes(self._cost)
            parts.append(f"{moved:.3g} GB moved, {alone:.3g} GB by the LLM alone")
        return "; ".join(parts)

    async def close(self) -> None:
        """Close the connections to the LLM's server."""
        await self._llm.close()


def chat_loop(settings: EdgeSettings, console: Console) -> None:
    """Questions, one a line, until an empty one or Ctrl-D.

    Raises:
        ConfigError, PairError, DataError: the models or the router cannot be used.
    """
    settings.check()
    with asyncio.Runner() as runner:
        chat = runner.run(open_chat(settings, console))
        try:
            while question := _question(console):
                try:
                    runner.run(chat.ask(question))
                except LlmUnavailableError as error:
                    console.print()
                    console.print(f"error: {error}", style="bold red", markup=False, highlight=False)
        finally:
            runner.run(chat.close())


def _question(console: Console) -> str:
    try:
        return console.input("[bold]> [/bold]").strip()
    except EOFError:
        return ""


async def open_chat(settings: EdgeSettings, console: Console, http_client: Any = None) -> EdgeChat:
    """Load the SLM and look at the LLM's server; `http_client` is for tests."""
    slm = ModelConfig(path=settings.slm)
    tokenizer = load_tokenizer(slm)
    try:
        remote = RemoteConfig(url=settings.llm_url, model=settings.llm_model, max_attempts=3)
    except ValidationError as error:
        raise ConfigError(f"--llm-url: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
    client = RemoteClient(remote, away=LlmUnavailableError, http_client=http_client)
    end_ids, longest = eos_token_ids(slm, tokenizer), context_length(load_hf_config(slm))
    longest = min(longest, await _servers_length(client, settings, console) or longest)
    config = CiterConfig(
        name="chat",
        output_dir=".",
        pair=PairConfig(slm=slm, llm=ModelConfig(path=settings.llm or settings.slm)),
        data=DataConfig(collect="embedded:train"),
        engine=EngineConfig(remote=remote),
    )
    vocabulary = max(tokens_by_id(tokenizer)) + 1
    fingerprint = "" if settings.router is None else model_fingerprint(slm)
    spec = EngineSpec(config, vocabulary, end_ids, longest, None, fingerprint)
    engine = build_engine("slm", spec)
    assert isinstance(engine, TransformersEngine)
    ref, threshold, router_cost = _router(settings, engine, fingerprint)
    job = Job("", [], settings.max_tokens, GREEDY, settings.model, ref, threshold)
    return EdgeChat(
        engine,
        RemoteEngine(client, shared_vocab_size=vocabulary, eos_token_ids=end_ids, max_model_len=longest),
        tokenizer=tokenizer,
        encode=lambda question: _encode(question, tokenizer),
        job=job,
        max_model_len=longest,
        end_ids=end_ids,
        cost=None if settings.llm is None else _cost(config.pair, router_cost),
        console=console,
        on_llm_unavailable=settings.on_llm_unavailable,
    )


async def _servers_length(client: RemoteClient, settings: EdgeSettings, console: Console) -> int | None:
    """The context length of the server's model; its absence now may be over when a question comes."""
    if settings.model == "slm":
        return None
    try:
        return await client.max_model_len()
    except LlmUnavailableError:
        if settings.on_llm_unavailable == "error" or settings.model == "llm":
            raise
        console.print(NOTE, style="bold red", markup=False, highlight=False)
        return None


def _router(
    settings: EdgeSettings, engine: TransformersEngine, fingerprint: str
) -> tuple[RouterRef | None, float, RouterCost | None]:
    """The router as a scorer of the SLM, its threshold, and its cost."""
    if settings.model != "routed" or settings.router is None:
        return None, 0.0, None
    router, metadata = load_router(settings.router, slm_fingerprint=fingerprint)
    ref = RouterRef(settings.router.name, str(settings.router))
    engine.set_scorer(scorer_name(ref.version), engine.router_scorer(router))
    table: CalibrationTable = metadata.calibration
    threshold = metadata.threshold if settings.threshold is None else settings.threshold
    if settings.llm_share is not None:
        threshold = table.threshold_for(settings.llm_share)
    return ref, threshold, RouterCost(sum(tensor.numel() for tensor in router.state_dict().values()))


def _encode(question: str, tokenizer: Any) -> list[int]:
    """A chat of one question, where the tokenizer has a template; else the bare line."""
    if not tokenizer.chat_template:
        return PromptFormat().encode_text(f"{question}\n", tokenizer, chat=False)
    messages = [{"role": "user", "content": question}]
    text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    return PromptFormat().encode_text(text, tokenizer, chat=True)


def _cost(pair: PairConfig, router: RouterCost | None) -> PairCost:
    slm, llm = (ModelCost.from_config(load_hf_config(model)) for model in (pair.slm, pair.llm))
    return PairCost(slm, llm, router)
