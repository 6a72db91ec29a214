"""A tiny server that speaks vLLM's dialect of `/v1/completions` (token ids both ways) over any engine, for tests.

It draws sampled tokens from (seed, position in the call), as a server does, so a client that cut turns carelessly would
show. `Dialect.extensions = False` answers as a server without token ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import httpx
import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from transformers import PreTrainedModel

from citer_ray.engine import Sampling
from citer_ray.engines.sampling import sample

URL = "http://llm.test/v1"


@dataclass
class Dialect:
    """The server.

    Attributes:
        model: what writes.
        extensions: return token ids.
        answers: statuses (with headers) of the next completions, before any succeeds.
        bodies: of every completion.
        keys: `authorization` of every request.
    """

    model: PreTrainedModel
    extensions: bool = True
    answers: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    def http(self) -> httpx.AsyncClient:
        """A client of it, in this process."""
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app()), base_url=URL)

    def app(self) -> FastAPI:
        """The application."""
        app = FastAPI()

        @app.get("/v1/models")
        async def models(request: Request) -> dict[str, Any]:
            self.keys.append(request.headers["authorization"])
            base = {"object": "model", "created": 0, "owned_by": "test"}
            listed = [{"id": "big", "max_model_len": 256, "parent": None}, {"id": "lora", "parent": "big"}]
            return {"object": "list", "data": [base | one for one in listed]}

        @app.post("/v1/completions")
        async def completions(request: Request) -> Response:
            self.keys.append(request.headers["authorization"])
            if self.answers:
                status, headers = self.answers.pop(0)
                message = f"no, and your key is {self.keys[-1]}"
                return JSONResponse({"error": {"message": message}}, status, headers)
            body = await request.json()
            self.bodies.append(body)
            choice = self._echo(body) if body.get("echo") else self._write(body)
            envelope = {"id": "1", "object": "text_completion", "created": 0, "model": body["model"]}
            return JSONResponse(envelope | {"choices": [choice]})

        return app

    def _write(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, written, steps = list(body["prompt"]), [], []
        sampling = Sampling(
            temperature=body["temperature"],
            top_p=body.get("top_p", 1.0),
            top_k=body.get("top_k", 0),
            seed=body.get("seed", 0),
        )
        while len(written) < body["max_tokens"]:
            logits = self._logits(ids)[-1]
            biased = logits.clone()
            for token, bias in body.get("logit_bias", {}).items():
                biased[int(token)] += bias
            written.append(sample(biased.double().numpy(), sampling, len(written)))
            steps.append((written[-1], logits.log_softmax(-1)))
            ids.append(written[-1])
            if written[-1] in body["stop_token_ids"]:
                return self._choice(steps, "stop")
        return self._choice(steps, "length")

    def _echo(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = body["prompt"]
        logprobs = self._logits(ids).log_softmax(-1)
        return self._choice([(ids[0], None), *zip(ids[1:], logprobs[:-1], strict=True)], "length")

    def _choice(self, steps: list[tuple[int, torch.Tensor | None]], reason: str) -> dict[str, Any]:
        tops = []
        for token, logprobs in steps:
            best = None if logprobs is None else int(logprobs.argmax())
            tops.append(None if logprobs is None else {self._name(one): float(logprobs[one]) for one in (token, best)})
        choice: dict[str, Any] = {
            "index": 0,
            "text": "",
            "finish_reason": reason,
            "logprobs": {
                "tokens": [self._name(token) for token, _ in steps],
                "token_logprobs": [None if one is None else float(one[token]) for token, one in steps],
                "top_logprobs": tops,
                "text_offset": [0] * len(steps),
            },
        }
        return choice | ({"token_ids": [token for token, _ in steps]} if self.extensions else {})

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self.extensions else f"word{token}"

    def _logits(self, ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(torch.tensor([ids])).logits[0].float()
