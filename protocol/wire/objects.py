"""The Response object and its parts, as they go out."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType


class InputTokensDetails(msgspec.Struct):
    """`cached_tokens`: input tokens whose KV was already there."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """`reasoning_tokens`: output tokens that were reasoning."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    """Tokens of a leg (in `response.done`) or of a run (in a terminal event)."""

    input_tokens: int = 0
    input_tokens_details: InputTokensDetails = msgspec.field(default_factory=InputTokensDetails)
    output_tokens: int = 0
    output_tokens_details: OutputTokensDetails = msgspec.field(default_factory=OutputTokensDetails)
    total_tokens: int = 0


class OutputText(msgspec.Struct, tag="output_text"):
    """The text of an output message."""

    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct, tag="reasoning_text"):
    """The text of an output reasoning item."""

    text: str


class OutputMessage(msgspec.Struct, tag="message"):
    """A message that the model made."""

    id: str
    status: str
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class OutputReasoning(msgspec.Struct, tag="reasoning"):
    """Reasoning that the model made."""

    id: str
    status: str
    content: list[ReasoningText]
    summary: list[Any] = []


class OutputFunctionCall(msgspec.Struct, tag="function_call"):
    """A function call that the model made."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class OutputCustomCall(msgspec.Struct, tag="custom_tool_call"):
    """A custom tool call that the model made."""

    id: str
    status: str
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


OutputItem: TypeAlias = OutputMessage | OutputReasoning | OutputFunctionCall | OutputCustomCall
OutputCall: TypeAlias = OutputFunctionCall | OutputCustomCall
OutputType: TypeAlias = Literal["function_call_output", "custom_tool_call_output"]
Status: TypeAlias = Literal["in_progress", "completed", "failed", "incomplete"]

OUTPUT_TYPES: dict[type[OutputCall], OutputType] = {
    OutputFunctionCall: "function_call_output",
    OutputCustomCall: "custom_tool_call_output",
}
"""The type of item that answers each kind of call."""


class RequiredInput(msgspec.Struct):
    """One thing that a held run waits for."""

    type: OutputType
    call_id: str
    name: str


class ErrorDetail(msgspec.Struct):
    """Why a Response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """Why a Response is incomplete."""

    reason: str


class Response(msgspec.Struct, kw_only=True):
    """The Response object, as it stands at one event."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    model: str
    output: list[OutputItem]
    usage: Usage | None = None
    error: ErrorDetail | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    tools: list[msgspec.Raw] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    metadata: dict[str, str] = {}
    temperature: float = 1.0
    top_p: float = 1.0
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    reasoning: dict[str, Any] = msgspec.field(default_factory=lambda: {"effort": None, "summary": None})
    text: dict[str, Any] = msgspec.field(default_factory=lambda: {"format": {"type": "text"}})
    truncation: str = "disabled"
    store: bool = True
    background: bool = False
    completed_at: int | None = None
    service_tier: str = "default"
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    top_logprobs: int = 0
    lifecycle: str
    work: dict[str, Any] | UnsetType = UNSET
