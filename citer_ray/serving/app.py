"""The ASGI application: routes, keys, size limits, and errors in OpenAI's shape.

Built by the ingress's replicas around a `Service`; `tests/unit` runs it without Ray. Logs are records with
`request_id`, which every response carries as `x-request-id`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from citer_ray.config_serve import ServeConfig
from citer_ray.serving.api_errors import ApiError, overloaded
from citer_ray.serving.assembly import Assembler
from citer_ray.serving.choices import Backend, Delta
from citer_ray.serving.generation import Generation
from citer_ray.serving.metrics import Metrics
from citer_ray.serving.planning import MODELS, ServedPair, plan
from citer_ray.serving.requests import ChatRequest, CompletionRequest, parse
from citer_ray.serving.routers import RoutersInService

logger = logging.getLogger(__name__)

DEADLINE_HEADER = "x-deadline-seconds"
_PLAYGROUND = Path(__file__).parent / "playground.html"


@dataclass
class Service:
    """What the routes work with; `routers` is replaced when a router is swapped.

    While `draining`, running responses go on, and new ones are refused.
    """

    config: ServeConfig
    pair: ServedPair
    backend: Backend
    routers: RoutersInService = field(default_factory=RoutersInService)
    api_keys: tuple[str, ...] = ()
    metrics: Metrics = field(default_factory=Metrics)
    sends_request_ids: bool = True  # Serve's proxy sends them itself
    draining: bool = False

    @property
    def in_flight(self) -> int:
        """Responses in progress."""
        return self.metrics.num_responses


def build_app(service: Service) -> FastAPI:
    """The application."""
    app = FastAPI(title="citer_ray", docs_url=None, redoc_url=None, openapi_url=None)
    _add_errors(app)
    _add_health(app, service)
    _add_api(app, service)
    app.add_middleware(_RequestIds, sends=service.sends_request_ids)
    if service.config.allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.config.allow_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", DEADLINE_HEADER],
            expose_headers=["x-request-id", "x-citer-degraded"],
        )
    return app


class _RequestIds:
    """Gives every request an id, and every response the header; plain ASGI, so that streams pass untouched."""

    def __init__(self, app: ASGIApp, sends: bool) -> None:
        self._app, self._sends = app, sends

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        usable = 0 < len(given) <= 128 and given.isascii() and given.isprintable()
        request_id = given if usable else secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if self._sends and message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        path = request.url.path[:128]
        message = f"{request.method} {path}: {error.detail}"
        code = "not_found" if error.status_code == 404 else None
        return JSONResponse(ApiError(message, status=error.status_code, code=code).body, error.status_code)

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> JSONResponse:
        logger.error("a request failed", exc_info=error, extra={"request_id": _request_id(request)})
        return JSONResponse(_internal_error(request).body, 500)


def _request_id(request: Request) -> str:
    return str(getattr(request.state, "request_id", ""))


def _internal_error(request: Request) -> ApiError:
    return ApiError(
        f"internal error; the server's log has it under request {_request_id(request)}", status=500, code="internal"
    )


def _add_health(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        if service.draining:
            return JSONResponse({"status": "stopping"}, 503)
        if await service.backend.ready():
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "starting"}, 503, {"Retry-After": "1"})

    @app.get("/")
    async def playground() -> Response:
        if not _PLAYGROUND.is_file():
            raise HTTPException(404, "there is no page here; the API is under /v1")
        return HTMLResponse(_PLAYGROUND.read_text("utf-8"))


def _add_api(app: FastAPI, service: Service) -> None:
    keys = [hashlib.sha256(key.encode()).digest() for key in service.api_keys]

    def check_key(request: Request) -> None:
        if not keys:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(given.strip().encode()).digest()
        # Every key is compared, in constant time, whichever is right.
        known = [hmac.compare_digest(digest, key) for key in keys]
        if scheme.lower() != "bearer" or not any(known):
            raise ApiError("a valid API key is needed: Authorization: Bearer KEY", status=401, code="invalid_api_key")

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        check_key(request)
        served = [name for name in MODELS if name != "routed" or service.routers.current is not None]
        return {"object": "list", "data": [_model(name, service.routers) for name in served]}

    @app.get("/v1/models/{name}")
    async def model(name: str, request: Request) -> dict[str, Any]:
        check_key(request)
        if name not in MODELS or (name == "routed" and service.routers.current is None):
            raise ApiError(f"the model {name[:64]!r} does not exist", status=404, param="model", code="model_not_found")
        return _model(name, service.routers)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        check_key(request)
        return await _answer(request, service, ChatRequest)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        check_key(request)
        return await _answer(request, service, CompletionRequest)


def _model(name: str, routers: RoutersInService) -> dict[str, Any]:
    values: dict[str, Any] = {"id": name, "object": "model", "created": 0, "owned_by": "citer_ray"}
    if name == "routed" and routers.current is not None:
        calibrated = bool(routers.current.calibration.points)
        values["citer"] = {
            "router": routers.current.ref.version,
            "threshold": routers.current.threshold,
            "calibrated": calibrated,
        }
    return values


async def _answer(request: Request, service: Service, kind: type[ChatRequest] | type[CompletionRequest]) -> Response:
    began, status, model, router = time.monotonic(), 200, "", ""
    try:
        if service.draining:
            raise overloaded("the server is stopping", retry_after_s=service.config.retry_after_s)
        asked = parse(kind, await _body(request, service.config.max_body_bytes))
        model = asked.model if asked.model in MODELS else ""
        planned = plan(asked, service.pair, service.config, service.routers)
        router = planned.router
        deadline_s = _deadline(request, service.config.deadline_s)
        generation = Generation(planned, service.pair, service.backend, service.metrics, deadline_s)
        assembler = Assembler(
            planned,
            chat=isinstance(asked, ChatRequest),
            trace=asked.trace,
            logprobs=asked.wants_logprobs,
            include_usage=asked.include_usage,
            cost=service.pair.cost,
        )
        if asked.stream:
            return await _stream(request, generation, assembler, asked.include_usage)
        content = await _unless_disconnected(request, generation.whole(assembler))
        return Response(content, headers=_headers(generation), media_type="application/json")
    except ApiError as error:
        status = error.status
        raise
    except Exception:
        status = 500
        raise
    finally:
        seconds = time.monotonic() - began
        service.metrics.request(model, router, status, seconds)
        values = {"request_id": _request_id(request), "model": model, "status": status, "seconds": round(seconds, 4)}
        logger.info("request %(request_id)s: %(model)s %(status)s in %(seconds)s s", values, extra=values)


def _headers(generation: Generation) -> dict[str, str]:
    headers = {"x-citer-router": generation.plan.router} if generation.plan.router else {}
    return headers | ({"x-citer-degraded": "true"} if generation.degraded else {})


async def _stream(request: Request, generation: Generation, assembler: Assembler, include_usage: bool) -> Response:
    """A stream whose status is known: it begins when the first delta is there."""
    deltas = generation.deltas()
    try:
        first = await _unless_disconnected(request, anext(deltas))
    except BaseException:
        await deltas.aclose()
        raise
    events = _events(request, first, deltas, generation, assembler, include_usage)
    headers = _headers(generation) | {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


async def _events(
    request: Request,
    first: Delta,
    deltas: AsyncGenerator[Delta, None],
    generation: Generation,
    assembler: Assembler,
    include_usage: bool,
) -> AsyncIterator[bytes]:
    async with aclosing(deltas):
        try:
            yield _event(assembler.chunk(first))
            async for delta in deltas:
                yield _event(assembler.chunk(delta))
        except ApiError as error:
            yield _event(_json_text(error))
            return
        except Exception as error:
            logger.error("a stream failed", exc_info=error, extra={"request_id": _request_id(request)})
            yield _event(_json_text(_internal_error(request)))
            return
    if include_usage:
        yield _event(assembler.usage_chunk())
    yield _event("[DONE]")


def _event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


def _json_text(error: ApiError) -> str:
    return bytes(JSONResponse(error.body).body).decode()


async def _body(request: Request, limit: int) -> bytes:
    """The request's body, as long as it is not too large."""
    too_large = ApiError(f"the body is larger than {limit} bytes", status=413, code="body_too_large")
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal() or int(declared[:20]) > limit:
        raise too_large
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > limit:
            raise too_large
    return bytes(content)


def _deadline(request: Request, longest: float) -> float:
    given = request.headers.get(DEADLINE_HEADER)
    if given is None:
        return longest
    try:
        seconds = float(given)
    except ValueError:
        seconds = float("nan")
    if not 0 < seconds < float("inf"):
        raise ApiError(f"{DEADLINE_HEADER} must be a positive number of seconds", param=DEADLINE_HEADER)
    return min(seconds, longest)


async def _unless_disconnected(request: Request, work: Awaitable[Any]) -> Any:
    """The result of `work`, which is cancelled if the client goes away first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            raise ApiError("the client closed the connection", status=499, code="client_closed")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
