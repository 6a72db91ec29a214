"""What Ray Serve and HTTP add to routed decoding: one stream of the embedded pair against the loop in one process.

Both ways decode the same tokens in turn, at an LLM share of about 20 %, with a router of random weights (what is routed
does not matter here, how often does). Parts: `latency`, `load` (`serving_load`), and `bigger` and `paced`
(`serving_pairs`). Read by `__main__`.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks import serving_pairs
from benchmarks.harness import Options, Quotient, Result
from benchmarks.localhost import free_port
from benchmarks.untrained_router import QUESTIONS, write_router
from citer_ray.config import CiterConfig
from citer_ray.config_loading import load_config
from citer_ray.decoding import Request, decode
from citer_ray.engine import Engine, Sampling
from citer_ray.engines.build import build_engine, limit_threads
from citer_ray.policy import Threshold
from citer_ray.preparation import engine_spec, prepare
from citer_ray.router_artifact import read_metadata

_SHARE = 0.2
_REPLICA = "{num_cpus: 0.1, max_ongoing: 400}"


def run(options: Options) -> Iterator[Result]:
    """Measure; see the module."""
    # Ray gives its workers a low priority; the process that is compared with has the usual one.
    os.environ.setdefault("RAY_worker_niceness", "0")
    from citer_ray.on_ray.serve_environment import use_fast_paths

    use_fast_paths()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if options.wants("latency") or options.wants("load"):
            yield from _embedded(folder / "embedded", options)
        if options.wants("bigger"):
            yield from _bigger(folder / "bigger", options)
        if options.wants("paced"):
            yield from _paced(folder / "paced", options)


@contextmanager
def _served(folder: Path, settings: list[str]) -> Iterator[tuple[CiterConfig, Path, str]]:
    """A pair in service: its configuration, its untrained router, and its address."""
    from citer_ray.on_ray.serve_run import serving

    settings = [*settings, f"output_dir={folder / 'run'}", f"serve.router={folder / 'router'}"]
    settings += [f"serve.{name}={_REPLICA}" for name in ("ingress", "slm", "llm")]
    plain = load_config("configs/embedded.yaml", [one for one in settings if not one.startswith("engine.factory")])
    asyncio.run(write_router(plain, folder / "router"))
    config = load_config("configs/embedded.yaml", [*settings, f"serve.port={free_port()}", "engine.max_rows=400"])
    with serving(config) as address:
        yield config, folder / "router", address


def _embedded(folder: Path, options: Options) -> Iterator[Result]:
    from benchmarks import serving_load

    with _served(folder, []) as (config, router, address):
        if options.wants("latency"):
            yield from _latency("embedded", config, router, address, options, 1.6, 40 if options.short else 150)
        if options.wants("load"):
            yield from serving_load.measure(address, options)


def _bigger(folder: Path, options: Options) -> Iterator[Result]:
    tokens = (20, 8) if options.short else (150, 40)
    with _served(folder, serving_pairs.bigger_pair(folder, short=options.short)) as (config, router, address):
        yield from _latency("bigger", config, router, address, options, 1.15, tokens[0])
        threshold = serving_pairs.threshold_for(address, _SHARE, tokens[0], serving_pairs.SAMPLED)
        repeats, targets = (1, None) if options.short else (options.repeats, (0.75, 1.47))
        yield from serving_pairs.bigger_against_llm_alone(address, threshold, tokens, repeats, targets)


def _paced(folder: Path, options: Options) -> Iterator[Result]:
    seconds = 2.0 if options.short else 15.0
    targets = None if options.short else (0.65, 2.0)
    with _served(folder, [serving_pairs.PACED]) as (_, _, address):
        for streams in (4, 32):
            yield from serving_pairs.paced_against_llm_alone(
                address, streams, _SHARE, seconds, options.repeats, targets
            )


def _latency(
    name: str, config: CiterConfig, router: Path, address: str, options: Options, target: float, tokens: int
) -> Iterator[Result]:
    """A routed response over HTTP against the loop in this process, and the first token against the SLM's own."""
    threshold = read_metadata(router).calibration.threshold_for(_SHARE)
    with httpx.Client(base_url=address, timeout=600) as http:
        client = _Client(http, threshold, tokens)
        alone = _InProcess.build(config, router, threshold, tokens)
        # Both ways warm up on the same prompts, and must agree on every token.
        same = sum(client.ids(question) == alone.ids(question) for question in QUESTIONS)
        share = client.share(QUESTIONS[0])
        repeats = 1 if options.short else (4 if name == "embedded" else 1) * options.repeats
        note, facts = f"{same}/{len(QUESTIONS)}", {"llm_share": share, "tokens": tokens, "repeats": repeats}
        pairs = [(_seconds(client.routed, q), _seconds(alone.routed, q)) for _ in range(repeats) for q in QUESTIONS]
        yield _quotient(f"{name}: HTTP over in-process, wall time", pairs, options.short, target, note, facts)
        yield from _first_tokens(name, client, options, repeats)


def _first_tokens(name: str, client: _Client, options: Options, repeats: int) -> Iterator[Result]:
    """Of a dozen prompts: those whose first token the SLM writes, and those that begin with a visit."""
    prompts = [f"{question} {index}" for index in range(4) for question in QUESTIONS]
    writers = {prompt: client.first_writer(prompt) for prompt in prompts}
    for writer in sorted(set(writers.values())):
        chosen = [prompt for prompt in prompts if writers[prompt] == writer]
        pairs = [(client.first("routed", one), client.first("slm", one)) for _ in range(repeats) for one in chosen]
        title = f"{name}: first token by the {writer.upper()}, over the SLM's alone"
        yield _quotient(title, pairs, options.short, 1.3, f"{len(chosen)} of {len(prompts)} prompts", {})


def _quotient(
    name: str, pairs: list[tuple[float, float]], short: bool, target: float, note: str, facts: dict[str, Any]
) -> Quotient:
    ours, reference = (statistics.median(side) for side in zip(*pairs, strict=True))
    settings = facts | {"ours_ms": [a * 1000 for a, _ in pairs], "reference_ms": [b * 1000 for _, b in pairs]}
    return Quotient(name, ours * 1000, reference * 1000, "ms", None if short else target, True, note, settings)


def _seconds(work: Callable[[str], object], question: str) -> float:
    began = time.perf_counter()
    work(question)
    return time.perf_counter() - began


@dataclass(frozen=True)
class _Client:
    """Requests over HTTP."""

    http: httpx.Client
    threshold: float
    tokens: int

    def routed(self, question: str, **fields: Any) -> dict[str, Any]:
        """The body of a routed response."""
        response = self.http.post("/v1/chat/completions", json=self._body(question, "routed") | fields)
        response.raise_for_status()
        body: dict[str, Any] = response.json()
        return body

    def ids(self, question: str) -> list[int]:
        """Its tokens."""
        return [token["id"] for token in self._tokens(question)]

    def first_writer(self, question: str) -> str:
        """Who writes its first token."""
        return str(self._tokens(question, max_tokens=1)[0]["writer"])

    def _tokens(self, question: str, **fields: Any) -> list[dict[str, Any]]:
        choice = self.routed(question, citer={"trace": True}, **fields)["choices"][0]
        tokens: list[dict[str, Any]] = choice["citer"]["tokens"]
        return tokens

    def share(self, question: str) -> float:
        """Its LLM share."""
        return float(self.routed(question)["usage"]["citer"]["llm_share"])

    def first(self, model: str, question: str) -> float:
        """Seconds to the first token of a stream, which is read to its end."""
        body = self._body(question, model) | {"stream": True, "max_tokens": 10}
        began, seconds = time.perf_counter(), 0.0
        with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
            for line in response.iter_lines():
                if not seconds and line.startswith("data: {"):
                    seconds = time.perf_counter() - began
        return seconds

    def _body(self, question: str, model: str) -> dict[str, Any]:
        routing = {"threshold": self.threshold} if model == "routed" else {}
        return serving_pairs.chat_body(model, question, self.tokens, temperature=0, **routing)


@dataclass(frozen=True)
class _InProcess:
    """The same responses by the loop on two engines of this process."""

    tokenizer: Any
    slm: Engine
    llm: Engine
    policy: Threshold
    tokens: int
    runner: asyncio.Runner

    @classmethod
    def build(cls, config: CiterConfig, router: Path, threshold: float, tokens: int) -> _InProcess:
        """Load both models."""
        prepared = prepare(config)
        spec = engine_spec(prepared)
        limit_threads(config, config.evaluate.workers)
        slm, llm = build_engine("slm", spec, router=router), build_engine("llm", spec)
        return cls(prepared.tokenizer, slm, llm, Threshold("router", threshold), tokens, asyncio.Runner())

    def ids(self, question: str) -> list[int]:
        """Tokens of a response."""
        return self.routed(question)

    def routed(self, question: str) -> list[int]:
        """Decode one response."""
        prompt = [self.tokenizer.bos_token_id, *self.tokenizer.encode(f"{question}\n", add_special_tokens=False)]
        request = Request(prompt, self.policy, self.tokens, Sampling(ignore_eos=True))
        return self.runner.run(decode(self.slm, self.llm, request)).token_ids
