"""Routes: who answers which path, and how requests become calls of the engine.

Knows: HTTP and JSON. Does not know: sockets and signals (server.py), the wire formats' details (writers.py,
sglang.py), or the engine's thread (loop.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import jspark
from jspark.answer import Answer, Delta, Output
from jspark.errors import UserError
from jspark.llm import LLM
from serve.chat import prompt_ids
from serve.errors import HttpError
from serve.figures import calibration_fields, cost_fields
from serve.loop import Call, DeviceLoop, Full, Unavailable
from serve.metrics import CONTENT_TYPE
from serve.openapi import describe
from serve.params import Job, answers, as_http, chat_job, completion_job, generate_job
from serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, GenerateRequest, TokenizeRequest
from serve.settings import ServerFlags
from serve.sglang import GenerateWriter
from serve.stream import DONE, event, parse, read_body, send_bytes, send_events, to_json, until_gone
from serve.token_text import TokenTexts
from serve.writers import ChatWriter, CompletionWriter

T = TypeVar("T")
#: Threads that tokenize prompts, and as many that compile grammars, which can take a minute each.
_THREADS = 4


class Api:
    """The routes over one engine. note: what the access log says of a request, by its scope."""

    def __init__(self, engine: DeviceLoop, flags: ServerFlags):
        self.engine, self.flags = engine, flags
        self.created = int(time.time())
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="prepare")
        self._grammar_threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
        self._texts: TokenTexts | None = None
        self._openapi: bytes | None = None
        #: How a request that generates is answered: its body, its job and its writer.
        kinds: dict[str, tuple[type[BaseModel], Callable[..., Job], type, str]] = {
            "/v1/completions": (
                CompletionRequest,
                lambda llm, body: completion_job(body),
                CompletionWriter,
                "cmpl",
            ),
            "/v1/chat/completions": (
                ChatRequest,
                lambda llm, body: chat_job(llm, body, flags.tool_call_parser),
                ChatWriter,
                "chatcmpl",
            ),
            "/generate": (GenerateRequest, lambda llm, body: generate_job(body), GenerateWriter, "gen"),
        }
        routes = [Route(path, Generation(self, *kind), methods=["POST"]) for path, kind in kinds.items()]
        routes += [
            Route("/v1/models", self._models),
            Route("/v1/models/{model:path}", self._model),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            Route("/version", self._version),
            Route("/server_info", self._server_info),
            Route("/get_server_info", self._server_info),
            Route("/model_info", self._model_info),
            Route("/get_model_info", self._model_info),
            Route("/flush_cache", self._flush_cache, methods=["GET", "POST"]),
            Route("/openapi.json", self._description),
        ]
        handlers = {HttpError: _http_error, UserError: _user_error, HTTPException: _starlette_error}
        handlers |= {Unavailable: _unavailable, Full: _full}
        self.app = Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]

    def close(self) -> None:
        """Ends the threads."""
        for threads in (self._threads, self._grammar_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    @property
    def model(self) -> str:
        """The served model's name."""
        return self.engine.llm.served_model_name

    def texts(self) -> TokenTexts | None:
        """Texts of single tokens; None without a tokenizer."""
        tokenizer = self.engine.llm.target.tokenizer
        if self._texts is None and tokenizer is not None:
            self._texts = TokenTexts(tokenizer)
        return self._texts

    def check_model(self, asked: str | None) -> None:
        """HttpError for a model that is not the one served."""
        if asked is not None and asked != self.model:
            raise HttpError(
                404,
                f"the model {asked!r:.200} does not exist; this server has {self.model!r}",
                param="model",
                code="model_not_found",
            )

    async def beside(self, function: Callable[..., T], *args: Any, grammar: bool = False) -> T:
        """Runs `function` where it does not hold up other requests. grammar: it may compile one."""
        threads = self._grammar_threads if grammar else self._threads
        result, seconds = await asyncio.get_running_loop().run_in_executor(threads, _timed, function, args)
        if self.engine.metrics:
            self.engine.metrics.cpu_seconds["http_workers"] += seconds
        if isinstance(result, Exception):
            raise result
        return result

    async def _read(self, request: Request, kind: type[Any]) -> Any:
        body = await read_body(request, self.flags.max_body_bytes)
        if self.flags.log_requests:
            request.scope["jspark"]["body"] = body.decode("utf-8", "replace")
        return await parse(kind, body)

    # ── about the server ──────────────────────────────────────────────────────────────────────────────────────

    async def _health(self, request: Request) -> Response:
        if self.engine.state == "ready":
            return Response(status_code=200)
        error = HttpError(503, self.engine.why, headers={"retry-after": "1"})
        return _json(error.body, 503, error.headers)

    async def _metrics(self, request: Request) -> Response:
        metrics = self.engine.metrics
        return Response(metrics.page() if metrics else b"", media_type=CONTENT_TYPE)

    async def _models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        self.check_model(request.path_params["model"])
        return _json(self._card())

    def _card(self) -> dict[str, Any]:
        llm = self.engine.llm
        return {
            "id": self.model,
            "object": "model",
            "created": self.created,
            "owned_by": "jspark",
            "root": llm.target.name,
            "parent": None,
            "max_model_len": llm.engine.config.context_length,
        }

    async def _version(self, request: Request) -> Response:
        return _json({"version": jspark.__version__})

    async def _server_info(self, request: Request) -> Response:
        llm, speculation = self.engine.llm, self.engine.speculation
        config = llm.engine.config
        drafts, tokens, accepted, positions = speculation.snapshot()
        load, metrics = self.engine.load, self.engine.metrics
        return _json(
            {
                "version": jspark.__version__,
                "model_path": llm.target.name,
                "served_model_name": self.model,
                "speculative_draft_model_path": llm.draft_name,
                "speculative_algorithm": None if llm.algorithm == "NONE" else llm.algorithm,
                "speculative_num_draft_tokens": llm.engine.block_size,
                "verify_mode": config.verify_mode,
                "dtype": config.dtype,
                "page_size": config.page_size,
                "context_length": config.context_length,
                "max_running_requests": config.max_running_requests,
                "max_total_num_tokens": config.max_total_tokens,
                "max_queued_requests": self.flags.max_queued_requests,
                "chunked_prefill_size": config.chunked_prefill_size,
                "kv_cache_bytes": llm.engine.kv_bytes,
                "programs": llm.engine.programs.report.programs,
                "compile_seconds": llm.engine.programs.report.seconds,
                "internal_states": [
                    {
                        "avg_spec_accept_length": speculation.accept_length,
                        "recent_spec_accept_length": speculation.recent_accept_length,
                        "spec_utilisation": None if config.verify_mode == "compact" else speculation.utilisation,
                        "num_drafts": drafts,
                        "num_draft_tokens": tokens,
                        "num_accepted_tokens": accepted,
                        "num_accepted_tokens_per_pos": positions,
                        "num_running_reqs": load.running,
                        "num_queue_reqs": load.waiting,
                        "num_live_reqs": self.engine.live,
                        "free_pages": load.free,
                        "pages": load.pages,
                        "cache_asked_tokens": load.cache_asked,
                        "cache_found_tokens": load.cache_found,
                        "steps": load.steps,
                        "calibration": load.calibration and calibration_fields(load.calibration),
                        "cost_table": load.cost and cost_fields(load.cost),
                        "event_loop_lag_max_seconds": metrics.lag_max if metrics else 0.0,
                        "cpu_seconds": metrics.cpu_seconds | {"process": time.process_time()} if metrics else {},
                    }
                ],
            }
        )

    async def _model_info(self, request: Request) -> Response:
        llm = self.engine.llm
        return _json(
            {
                "model_path": llm.target.name,
                "tokenizer_path": llm.target.name if llm.target.tokenizer else None,
                "is_generation": True,
                "model_type": llm.target.config.model_type,
                "vocab_size": llm.target.config.vocab_size,
                "context_length": llm.engine.config.context_length,
                "has_chat_template": bool(llm.target.tokenizer and llm.target.tokenizer.has_chat_template),
            }
        )

    async def _flush_cache(self, request: Request) -> Response:
        pages = await self.engine.ask(_flush)
        if pages is None:
            raise HttpError(501, "there is no prefix cache to flush; start without --no-radix-cache")
        return _json({"success": True, "pages_freed": pages})

    async def _description(self, request: Request) -> Response:
        if self._openapi is None:
            self._openapi = await self.beside(lambda: to_json(describe(bool(self.flags.keys))))
        return Response(self._openapi, media_type="application/json")

    # ── text and tokens ───────────────────────────────────────────────────────────────────────────────────────

    async def _tokenize(self, request: Request) -> Response:
        body: TokenizeRequest = await self._read(request, TokenizeRequest)
        llm = self.engine.llm
        self.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise HttpError(400, "prompt and messages: one of them must be given; correct it", param="prompt")
        return await self.beside(self._tokens, llm, body)

    def _tokens(self, llm: LLM, body: TokenizeRequest) -> Response:
        if body.prompt is None:
            ids = prompt_ids(llm, body, [tool.model_dump(exclude_none=True) for tool in body.tools or ()])
        else:
            ids = llm.target.need_tokenizer("a text").encode(body.prompt, body.add_special_tokens is not False)
        texts = self.texts() if body.return_token_strs else None
        strings = [texts.text(i) for i in ids] if texts else None
        length = llm.engine.config.context_length
        return _json({"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": strings})

    async def _detokenize(self, request: Request) -> Response:
        body: DetokenizeRequest = await self._read(request, DetokenizeRequest)
        self.check_model(body.model)
        tokenizer = self.engine.llm.target.need_tokenizer("a text")
        return await self.beside(lambda: _json({"prompt": tokenizer.decode(body.tokens, False)}))


class Generation:
    """A route whose requests go to the engine, as an ASGI application: it watches for clients that go away."""

    def __init__(self, api: Api, body: type[BaseModel], job: Callable[[LLM, Any], Job], writer: type, prefix: str):
        self._api, self._body, self._job, self._writer, self._prefix = api, body, job, writer, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        started = time.perf_counter()
        body = await self._api._read(Request(scope, receive), self._body)
        note, limit = scope["jspark"], self._api.flags.request_timeout
        clock = asyncio.timeout(limit or None)
        try:
            async with clock:
                await until_gone(receive, self._answer(body, note, started, send))
        except TimeoutError:
            if not clock.expired():
                raise
            error = HttpError(408, f"the answer was not complete after {limit:g} seconds; ask for less")
            if not note.get("status"):
                raise error from None
            note["error"] = str(error)
            # A client that reads slowly is one reason to be here.
            with contextlib.suppress(TimeoutError):
                last = event(error.body) + DONE
                async with asyncio.timeout(1):
                    await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _answer(self, body: Any, note: dict[str, Any], started: float, send: Send) -> None:
        api, engine = self._api, self._api.engine
        llm = engine.llm
        api.check_model(getattr(body, "model", None))
        engine.check_room(_count(body))
        job, found = await api.beside(self._prepare, llm, body, grammar=_constrained(body))
        note |= {"prompt_tokens": sum({a.prompt: len(a.request.prompt) for a in found}.values())}
        call = Call(found, started)
        answer_id = f"{self._prefix}-{secrets.token_hex(12)}"
        size = llm.engine.block_size
        writer = self._writer(body, job, call, api.model, await api.beside(api.texts), size, answer_id)
        engine.submit(call)
        try:
            if body.stream:
                await send_events(send, self._events(call, writer, note, _many_figures(job)))
            else:
                outputs = [pair async for deltas in call.deltas() for pair in _ended(deltas)]
                _note(note, call, [output for _, output in outputs])
                await send_bytes(send, 200, await api.beside(lambda: to_json(writer.whole(outputs))))
        except UserError as e:
            raise as_http(e) from None
        finally:
            if call.unfinished and engine.metrics:
                engine.metrics.aborted(len(call.unfinished))
            engine.abort(call)

    def _prepare(self, llm: LLM, body: Any) -> tuple[Job, list[Answer]]:
        try:
            job = self._job(llm, body)
            return job, answers(llm, job, self._api.flags.max_prompt_tokens)
        except UserError as e:
            raise as_http(e) from None

    async def _events(self, call: Call, writer: Any, note: dict[str, Any], beside: bool) -> AsyncIterator[bytes]:
        """What is sent, piece by piece. beside: writing a piece takes long enough to hold up others."""

        def written(deltas: list[tuple[Answer, Delta]]) -> bytes:
            return b"".join(event(chunk) for answer, delta in deltas for chunk in writer.chunks(answer, delta))

        begun, outputs = False, []
        try:
            async for deltas in call.deltas():
                outputs += [output for _, output in _ended(deltas)]
                data = await self._api.beside(written, deltas) if beside else written(deltas)
                if data:
                    begun = True
                    yield data
            _note(note, call, outputs)
            yield b"".join(map(event, writer.last_chunks())) + DONE
        except (Unavailable, HttpError, UserError) as e:
            if not begun:
                raise
            # The status has been sent: the error is an event, and clients raise it.
            note["error"] = str(e)
            error = e if isinstance(e, HttpError) else HttpError(400 if isinstance(e, UserError) else 503, str(e))
            yield event(error.body) + DONE


def _timed[T](function: Callable[..., T], args: tuple[Any, ...]) -> tuple[T | Exception, float]:
    """What `function` returns or raises, and the processor time that it took in this thread."""
    began = time.thread_time()
    try:
        result: Any = function(*args)
    except Exception as e:
        result = e
    return result, time.thread_time() - began


def _ended(deltas: Any) -> list[tuple[Answer, Output]]:
    """The answers that have ended; HttpError for one that broke off."""
    ended = [(answer, delta.output) for answer, delta in deltas if delta.output]
    for _, output in ended:
        if output.finish_reason == "abort":
            raise HttpError(400, f"the answer broke off: {output.stop_reason}", param="structured_outputs")
    return ended


def _many_figures(job: Job) -> bool:
    """Whether log-probabilities are written, many for each token."""
    return job.params.logprobs is not None or job.params.prompt_logprobs is not None


def _note(note: dict[str, Any], call: Call, outputs: list[Output]) -> None:
    """Figures for the access log."""
    note["completion_tokens"] = sum(o.completion_tokens for o in outputs)
    note["finish_reason"] = ",".join(dict.fromkeys(o.finish_reason for o in outputs))
    if call.first_token is not None:
        note["first_token_seconds"] = round(call.first_token - call.started, 4)


def _count(body: Any) -> int:
    """How many answers a body asks for."""
    if isinstance(body, GenerateRequest):
        prompts: Any = body.text if body.input_ids is None else body.input_ids
        n = body.sampling_params.n if body.sampling_params else None
    else:
        prompts, n = getattr(body, "prompt", None), body.n
    several = isinstance(prompts, list) and not isinstance(prompts[0], int)
    return (n or 1) * (len(prompts) if several else 1)


def _constrained(body: Any) -> bool:
    """Whether answering it may need a grammar."""
    asked = body.sampling_params if isinstance(body, GenerateRequest) else body
    names = ("response_format", "structured_outputs", "regex", "ebnf", "json_schema", "tools")
    return any(getattr(asked, name, None) is not None for name in names)


def _flush(llm: LLM) -> int | None:
    """Pages that the prefix cache gave up; None without one."""
    cache = llm.engine.scheduler.cache
    return None if cache is None else cache.clear()


def _json(value: Any, status: int = 200, headers: Any = None) -> Response:
    return Response(to_json(value), status, headers, media_type="application/json")


Handler = Callable[[Request, Any], Awaitable[Response]]


async def _http_error(request: Request, error: HttpError) -> Response:
    request.scope["jspark"]["error"] = str(error)
    return _json(error.body, error.status, error.headers)


async def _user_error(request: Request, error: UserError) -> Response:
    return await _http_error(request, as_http(error))


async def _unavailable(request: Request, error: Unavailable) -> Response:
    return await _http_error(request, HttpError(503, str(error), headers={"retry-after": "5"}))


async def _full(request: Request, error: Full) -> Response:
    headers = {"retry-after": str(error.seconds)}
    return await _http_error(request, HttpError(429, str(error), code="queue_full", headers=headers))


async def _starlette_error(request: Request, error: HTTPException) -> Response:
    if error.status_code == 404:
        known = "; /v1/models, /v1/completions and /v1/chat/completions do"
        return await _http_error(request, HttpError(404, f"{request.url.path!r:.200} does not exist here{known}"))
    if error.status_code == 405:
        message = f"{request.method} is not the method of {request.url.path}; see /openapi.json"
        return await _http_error(request, HttpError(405, message, headers=error.headers))
    return await _http_error(request, HttpError(error.status_code, error.detail))
