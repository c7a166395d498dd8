"""The server's routes: JSON in, JSON or events out, every error in OpenAI's envelope."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jllama.server import chat, completions, page, streams, tokens
from jllama.server.answers import Answers, Shape
from jllama.server.errors import FAULTS, ApiError, from_fault, unavailable
from jllama.server.fields import parse
from jllama.server.security import KEY, Guard
from jllama.server.service import Running, Service
from jllama.server.watch import DETAILS, Watch

LOG = logging.getLogger("jllama.server")
_MOST_BODY = 4 * 2**20  # bytes
_MOST_DROPPED = 16 * _MOST_BODY  # read all the same: who still sends as a connection is closed sees no answer
_BODY_SECONDS = 60.0
_GONE = 499  # nginx's word for a client that didn't wait


def build(service: Service) -> Starlette:
    """Return the app of a service."""
    html, headers = page.load()

    async def show_page(request: Request) -> Response:
        return Response(html, headers=headers, media_type="text/html")

    def bound(function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
        return functools.wraps(function)(functools.partial(function, service, *args))

    routes = [
        Route("/", show_page),
        Route("/health", bound(_health)),
        Route("/metrics", bound(_metrics)),
        Route("/v1/models", bound(_models)),
        Route("/v1/models/{name:path}", bound(_model)),
        Route("/v1/chat/completions", bound(_generate, chat.Shape()), methods=["POST"]),
        Route("/v1/completions", bound(_generate, completions.Shape()), methods=["POST"]),
        Route("/tokenize", bound(_convert, tokens.tokenize), methods=["POST"]),
        Route("/detokenize", bound(_convert, tokens.detokenize), methods=["POST"]),
    ]
    options = service.options
    middleware = [
        Middleware(Watch, metrics=service.metrics, paths=frozenset(route.path for route in routes)),
        Middleware(
            CORSMiddleware,
            allow_origins=options.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After", "X-Request-Id"],
            allow_private_network=bool(options.origins),
        ),
        Middleware(Guard, keys=options.keys, host=options.host, origins=options.origins),
    ]
    handlers = {ApiError: _refused, HTTPException: _unrouted, ClientDisconnect: _left}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)  # type: ignore[arg-type]
    app.router.redirect_slashes = False
    return app


async def _generate(service: Service, shape: Shape, request: Request) -> Response:
    llm, _ = service.loaded()
    asked = None
    try:
        async with service.prepare() as on_thread:
            body = await _body(request)
            asked = await on_thread(lambda: service.read(shape, parse(body), request.scope[KEY]))
            answers = Answers(asked, llm.tokenizer, shape, service.options.model)
            scores = await service.scores(asked)
            running = Running(service, asked, answers)
            request.scope[DETAILS] = lambda: _details(answers, running)
            await on_thread(running.start)
        if asked.stream:
            return streams.EventStream(running, answers, scores)
        try:
            answer = await streams.unless_gone(request, streams.whole(running, answers, scores))
        finally:
            running.cancel()
    except FAULTS as e:
        raise from_fault(e) from e
    return Response(status_code=_GONE) if answer is None else JSONResponse(answer)


def _details(answers: Answers, running: Running) -> str:
    usage = answers.usage()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    reasons = {choice.ended.completion.finish_reason if choice.ended else "broken off" for choice in answers.choices}
    words = {
        "prompt": usage["prompt_tokens"], "cached": cached, "generated": usage["completion_tokens"],
        **running.timings(), "finish": ",".join(sorted(reasons)),
    }  # fmt: skip
    return f"{answers.id} " + " ".join(f"{name}={value}" for name, value in words.items())


async def _convert(service: Service, function: tokens.Conversion, request: Request) -> Response:
    llm, _ = service.loaded()
    async with service.prepare() as on_thread:
        body = await _body(request)
        return JSONResponse(await on_thread(lambda: function(llm.tokenizer, parse(body))))


async def _body(request: Request) -> bytes:
    """Read the body of a request that should be JSON; whoever is slow or says too much is turned away."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415,
            f"the content type is {kind or 'missing'}: expected application/json, "
            "for curl -H 'Content-Type: application/json'",
        )
    body, size = bytearray(), 0
    too_large = ApiError(413, f"the body is larger than {_MOST_BODY} bytes", headers={"Connection": "close"})
    length = request.headers.get("content-length", "0")
    most = _MOST_BODY if "expect" in request.headers else _MOST_DROPPED
    if length.isascii() and length.isdigit() and int(length[:20]) > most:
        raise too_large
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > _MOST_DROPPED:
                    raise too_large
                if size <= _MOST_BODY:
                    body += part
    except TimeoutError:
        raise ApiError(408, "the body did not come", headers={"Connection": "close"}) from None
    if size > _MOST_BODY:
        raise too_large
    return bytes(body)


async def _health(service: Service, request: Request) -> Response:
    state = service.state
    if state == "serving":
        return JSONResponse({"status": "ok"})
    fault = unavailable(f"the server is {state}", state)
    return JSONResponse({"status": state, **fault.envelope}, fault.status, fault.headers)


async def _metrics(service: Service, request: Request) -> Response:
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


async def _models(service: Service, request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_card(service)]})


async def _model(service: Service, request: Request) -> Response:
    if request.path_params["name"] != service.options.model:
        raise ApiError(404, f"the model here is {service.options.model}", param="model", code="model_not_found")
    return JSONResponse(_card(service))


def _card(service: Service) -> dict[str, Any]:
    """What is known of the model; `meta` as llama.cpp has it, `max_model_len` as vLLM."""
    llm, _ = service.loaded()
    config = llm.params.config
    return {
        "id": service.options.model,
        "object": "model",
        "created": service.created,
        "owned_by": "jllama",
        "max_model_len": config.max_seq_len,
        "meta": {"n_ctx_train": config.max_seq_len, "n_vocab": config.vocab_size, "n_embd": config.dim},
        "chat_template": service.template is not None,
    }


async def _refused(request: Request, fault: ApiError) -> Response:
    return JSONResponse(fault.envelope, fault.status, fault.headers)


async def _unrouted(request: Request, fault: HTTPException) -> Response:
    path = request.url.path
    message = {404: f"there is no {path} here", 405: f"{path} is not for {request.method}"}
    known = ApiError(
        fault.status_code, message.get(fault.status_code, fault.detail), headers=fault.headers, code="not_found"
    )
    return JSONResponse(known.envelope, known.status, known.headers)


async def _left(request: Request, fault: ClientDisconnect) -> Response:
    return Response(status_code=_GONE)
