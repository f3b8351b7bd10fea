"""The server's own description, made from the types of its bodies.

Knows: OpenAPI 3.1, which route takes and gives what. Does not know: how requests are answered.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema

import jspark
from serve.errors import ErrorBody
from serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, GenerateRequest, TokenizeRequest

_JSON = "application/json"
_BODIES: tuple[type[BaseModel], ...] = (
    CompletionRequest,
    ChatRequest,
    GenerateRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
_ERRORS = {
    "400": "a field is wrong, unknown or not supported",
    "401": "the API key is missing or wrong",
    "404": "the model does not exist",
    "408": "the request took too long",
    "413": "the body is too long",
    "429": "the queue is full; try again after Retry-After seconds",
    "503": "the server is loading or shutting down",
}


def describe(keys: bool) -> dict[str, Any]:
    """The OpenAPI document. keys: requests need one."""
    _, schemas = models_json_schema(
        [(model, "validation") for model in _BODIES], ref_template="#/components/schemas/{model}"
    )
    components = dict(schemas["$defs"])
    components["Error"] = TypeAdapter(ErrorBody).json_schema(ref_template="#/components/schemas/{model}")
    components |= components["Error"].pop("$defs", {})
    text = {"200": {"description": "text", "content": {"text/plain": {"schema": {"type": "string"}}}}}
    one = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "jspark", "version": jspark.__version__},
        "paths": {
            "/v1/completions": {"post": _post("Continue prompts", CompletionRequest, streams=True)},
            "/v1/chat/completions": {"post": _post("Answer a conversation", ChatRequest, streams=True)},
            "/generate": {"post": _post("Continue prompts, as SGLang does", GenerateRequest, streams=True)},
            "/tokenize": {"post": _post("Text to token ids", TokenizeRequest)},
            "/detokenize": {"post": _post("Token ids to text", DetokenizeRequest)},
            "/v1/models": {"get": _get("The served model")},
            "/v1/models/{model}": {"get": _get("One model", "404") | {"parameters": [one]}},
            "/health": {"get": {"summary": "Whether requests are taken", "responses": _health()}},
            "/metrics": {"get": {"summary": "Figures for Prometheus", "responses": text}},
            "/version": {"get": _get("The version")},
            "/server_info": {"get": _get("Sizes and figures of the engine")},
            "/model_info": {"get": _get("What the model is")},
            "/flush_cache": {m: _get("Forget the prefix cache", "501") for m in ("get", "post")},
        },
        "components": {"schemas": components},
    }
    if keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
        for path in ("/health", "/metrics"):
            document["paths"][path]["get"]["security"] = []
    return document


def _error(text: str) -> dict[str, Any]:
    return {"description": text, "content": {_JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}}


def _good(streams: bool = False) -> dict[str, Any]:
    content: dict[str, Any] = {_JSON: {"schema": {"type": ["object", "array"]}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {"description": "the answer", "content": content}


def _post(summary: str, body: type[BaseModel], streams: bool = False) -> dict[str, Any]:
    return {
        "summary": summary,
        "requestBody": {
            "required": True,
            "content": {_JSON: {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}},
        },
        "responses": {"200": _good(streams)} | {status: _error(text) for status, text in _ERRORS.items()},
    }


def _get(summary: str, *more: str) -> dict[str, Any]:
    others = {"501": "there is no prefix cache"} | _ERRORS
    statuses = ("401", "503", *more)
    return {"summary": summary, "responses": {"200": _good()} | {s: _error(others[s]) for s in statuses}}


def _health() -> dict[str, Any]:
    return {"200": {"description": "ready"}, "503": _error(_ERRORS["503"])}
