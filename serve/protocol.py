"""Bodies of requests: what they may hold, field by field.

Knows: the OpenAI API's fields and those of vLLM and SGLang that clients send. A field that this server does not
honour is refused, unless it has the value that means nothing. Does not know: what the fields do (params.py).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_after_validator_function

#: Prompts of one request, continuations of one prompt.
MAX_PROMPTS, MAX_N = 2048, 128

Name = Annotated[str, Field(max_length=256)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Only:
    """Marks a field that this server does not honour: it may have these values, which change nothing."""

    def __init__(self, *values: Any):
        self._values = values

    def _check(self, value: Any) -> Any:
        if not any(type(value) is type(v) and value == v for v in self._values):
            raise ValueError("this is not supported by this server; leave the field out")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": list(self._values)}


class Body(BaseModel):
    """No unknown fields, no guessing of types, no infinities."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    """include_usage: a last chunk with usage. continuous_usage_stats: usage in every chunk (vLLM)."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[Any, Only(None, False)] = None


class JsonSchemaFormat(Body):
    """A named JSON schema."""

    name: Name | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What the answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class Constraint(Body):
    """vLLM's name for one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=10_000)] | None = None
    grammar: str | None = None


class Sampled(Body):
    """Fields that completions and chats share. None everywhere means: not said."""

    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=64)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=10_000)] | None = None
    bad_words: Annotated[list[Stop], Field(max_length=1000)] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Constraint | None = None
    regex: str | None = None
    ebnf: str | None = None
    return_token_ids: bool | None = None
    return_spec_tokens_details: bool | None = None
    disable_speculative_decoding: bool | None = None
    speculative_sampling: Literal["auto", "coupled", "rejection"] | None = None
    # Names for the sender's own books; they change nothing here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Annotated[Any, Only(None, "auto", "default")] = None
    store: Annotated[Any, Only(None, False)] = None
    best_of: Annotated[Any, Only(None, 1)] = None
    use_beam_search: Annotated[Any, Only(None, False)] = None
    length_penalty: Annotated[Any, Only(None, 1, 1.0)] = None
    include_stop_str_in_output: Annotated[Any, Only(None, False)] = None
    no_stop_trim: Annotated[Any, Only(None, False)] = None
    spaces_between_special_tokens: Annotated[Any, Only(None, True)] = None
    truncate_prompt_tokens: Annotated[Any, Only(None)] = None
    allowed_token_ids: Annotated[Any, Only(None)] = None
    return_tokens_as_token_ids: Annotated[Any, Only(None, False)] = None
    return_hidden_states: Annotated[Any, Only(None, False)] = None
    priority: Annotated[Any, Only(None, 0)] = None
    cache_salt: Annotated[Any, Only(None)] = None
    lora_path: Annotated[Any, Only(None, "")] = None


class CompletionRequest(Sampled):
    """`POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[
            list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)
        ]
    )
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Annotated[Any, Only(None, "")] = None
    add_special_tokens: Annotated[Any, Only(None, True)] = None


class TextPart(Body):
    """A part of a message; other types than text are not supported."""

    type: Literal["text"]
    text: str


class FunctionCall(Body):
    """What the model called. arguments: JSON, as text."""

    name: Name
    arguments: str


class ToolCall(Body):
    """A call of an earlier answer."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=1000)] | None = None
    tool_call_id: Name | None = None
    refusal: Annotated[Any, Only(None)] = None
    audio: Annotated[Any, Only(None)] = None
    function_call: Annotated[Any, Only(None)] = None
    annotations: Annotated[Any, Only(None, [])] = None


class Function(Body):
    """What the model may call. parameters: a JSON schema."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A function."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """One of the tools."""

    name: Name


class NamedTool(Body):
    """The tool that the model must call."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(Sampled):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Annotated[Any, Only(None, True)] = None
    continue_final_message: Annotated[Any, Only(None, False)] = None
    add_special_tokens: Annotated[Any, Only(None, False)] = None
    echo: Annotated[Any, Only(None, False)] = None
    chat_template: Annotated[Any, Only(None)] = None
    documents: Annotated[Any, Only(None)] = None
    functions: Annotated[Any, Only(None)] = None
    function_call: Annotated[Any, Only(None)] = None
    modalities: Annotated[Any, Only(None, ["text"])] = None
    audio: Annotated[Any, Only(None)] = None
    prediction: Annotated[Any, Only(None)] = None
    reasoning_effort: Annotated[Any, Only(None)] = None
    verbosity: Annotated[Any, Only(None)] = None
    web_search_options: Annotated[Any, Only(None)] = None


class GenerateParams(Body):
    """SGLang's sampling_params."""

    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    sampling_seed: int | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=64)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=10_000)] | None = None
    skip_special_tokens: bool | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    spaces_between_special_tokens: Annotated[Any, Only(None, True)] = None
    no_stop_trim: Annotated[Any, Only(None, False)] = None
    stop_regex: Annotated[Any, Only(None)] = None
    custom_params: Annotated[Any, Only(None)] = None


class GenerateRequest(Body):
    """`POST /generate`, SGLang's own."""

    text: str | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)] | None = None
    input_ids: (
        Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[
            list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)
        ]
        | None
    ) = None
    sampling_params: GenerateParams | None = None
    stream: bool | None = None
    rid: Name | None = None
    return_logprob: bool | None = None
    top_logprobs_num: int | None = None
    logprob_start_len: int | None = None
    return_text_in_logprobs: bool | None = None
    disable_speculative_decoding: bool | None = None
    lora_path: Annotated[Any, Only(None, "")] = None
    image_data: Annotated[Any, Only(None, [])] = None
    input_embeds: Annotated[Any, Only(None)] = None
    return_hidden_states: Annotated[Any, Only(None, False)] = None
    return_routed_experts: Annotated[Any, Only(None, False)] = None
    token_ids_logprob: Annotated[Any, Only(None)] = None
    session_params: Annotated[Any, Only(None)] = None
    stream_options: Annotated[Any, Only(None)] = None


class TokenizeRequest(Body):
    """`POST /tokenize`, vLLM's: a prompt or a conversation."""

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: Annotated[Any, Only(None, True)] = None
    continue_final_message: Annotated[Any, Only(None, False)] = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """`POST /detokenize`, vLLM's."""

    model: Name | None = None
    tokens: list[TokenId]
