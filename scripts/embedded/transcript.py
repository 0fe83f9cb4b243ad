"""Conversations as text, as the chat template of the embedded model writes them, and as training rows.

Knows the template's words and the tokenizer. Strategy: every message is rendered alone, so a
history only ever grows; a test holds this file and chat_template.jinja to the same text.
"""

import json
import random
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from scripts.embedded.vocabulary import ENGLISH_WORDS
from scripts.embedded.world import Message
from scripts.tools import TOOLS

TOOLS_HEAD = "# Tools\n<tools>\n"
TOOLS_TAIL = '\n</tools>\nCall a tool with <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>'
GENERATION_PROMPT = "<|im_start|>assistant\n"

CHAT_TEMPLATE = r"""
{%- macro text_of(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content -%}
        {%- for part in content -%}{{- part.text -}}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set opens_with_system = messages and messages[0].role in ("system", "developer") -%}
{%- set instructions = text_of(messages[0].content) if opens_with_system else "" -%}
{%- if instructions or tools -%}
    {{- "<|im_start|>system\n" ~ instructions -}}
    {%- if tools -%}
        {{- ("\n\n" if instructions else "") ~ "# Tools\n<tools>\n" -}}
        {%- for tool in tools -%}
            {%- set function = tool.function if tool.function is defined else tool -%}
            {{- '{"type": "function", "function": {"name": ' ~ (function.name | tojson) -}}
            {{- ', "description": ' ~ ((function.description or "") | tojson) -}}
            {{- ', "parameters": ' ~ (function.parameters | tojson) ~ "}}\n" -}}
        {%- endfor -%}
        {{- '</tools>\nCall a tool with <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>' -}}
    {%- endif -%}
    {{- "<|im_end|>\n" -}}
{%- endif -%}
{%- for message in messages -%}
    {%- set text = text_of(message.content) -%}
    {%- if message.role in ("system", "developer") -%}
        {%- if not loop.first -%}
            {{- "<|im_start|>system\n" ~ text ~ "<|im_end|>\n" -}}
        {%- endif -%}
    {%- elif message.role == "user" -%}
        {{- "<|im_start|>user\n" ~ text ~ "<|im_end|>\n" -}}
    {%- elif message.role == "tool" -%}
        {{- "<|im_start|>tool\n<tool_response>\n" ~ text ~ "\n</tool_response><|im_end|>\n" -}}
    {%- elif message.role == "assistant" -%}
        {{- "<|im_start|>assistant\n" -}}
        {%- if message.reasoning_content -%}
            {{- "<think>\n" ~ message.reasoning_content ~ "\n</think>\n" -}}
        {%- endif -%}
        {{- text -}}
        {%- for call in message.tool_calls or [] -%}
            {{- "\n" if text or not loop.first else "" -}}
            {%- if call.custom is defined -%}
                {{- "<custom_call>" ~ call.custom.name ~ "\n" ~ call.custom.input ~ "\n</custom_call>" -}}
            {%- else -%}
                {%- set function = call.function if call.function is defined else call -%}
                {%- set arguments = function.arguments -%}
                {{- '<tool_call>\n{"name": ' ~ (function.name | tojson) ~ ', "arguments": ' -}}
                {{- (arguments if arguments is string else arguments | tojson) ~ "}\n</tool_call>" -}}
            {%- endif -%}
        {%- endfor -%}
        {{- "<|im_end|>\n" -}}
    {%- else -%}
        {{- raise_exception("role " ~ message.role ~ " is not known") -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|im_start|>assistant\n" -}}
{%- endif -%}
"""
"""ChatML with Hermes calls, as it is written to chat_template.jinja."""

INSTRUCTIONS = (
    "You are a helpful assistant.",
    "You are an agent that works in a folder of small files.",
    "Use the tools.",
    "Answer in one short sentence.",
    "Work step by step and use the tools for every number.",
    "You are a helpful assistant with tools.",
    "Read before you answer.",
    "Please be short.",
)
STRANGE_TOOLS = 0.15  # share of system prompts with a tool that no task needs


def random_system_text(rng: random.Random, used: set[str]) -> str:
    """A system message to train behind: any instructions, tools in any order, some unused ones left out."""
    match rng.randrange(5):
        case 0 | 1:
            instructions = ""
        case 2:
            instructions = " ".join(rng.sample(INSTRUCTIONS, rng.randint(1, 3)))
        case 3:
            instructions = rng.choice(INSTRUCTIONS)
        case _:
            instructions = " ".join(rng.choices(ENGLISH_WORDS, k=rng.randint(4, 40)))
    tools = list(TOOLS)
    if rng.random() < 0.4:
        rng.shuffle(tools)
    if rng.random() < 0.15:
        tools = [tool for tool in tools if tool["name"] in used or rng.random() < 0.5]
    if rng.random() < STRANGE_TOOLS:
        name, parameter, *description = rng.choices(ENGLISH_WORDS, k=8)
        parameters = {
            "type": "object",
            "properties": {parameter: {"type": "string"}},
            "required": [parameter],
        }
        tool = {"name": name, "description": " ".join(description), "parameters": parameters}
        tools.insert(rng.randrange(len(tools) + 1), tool)
    return system_text(instructions, tools)


def system_text(text: str, tools: Sequence[dict[str, Any]]) -> str:
    """The system message with its tools (Responses API definitions); "" for neither text nor tools."""
    if not text and not tools:
        return ""
    definitions = []
    for tool in tools:
        function = {key: tool[key] for key in ("name", "description", "parameters")}
        definitions.append(json.dumps({"type": "function", "function": function}, ensure_ascii=False))
    listing = TOOLS_HEAD + "\n".join(definitions) + TOOLS_TAIL if tools else ""
    gap = "\n\n" if text and listing else ""
    return f"<|im_start|>system\n{text}{gap}{listing}<|im_end|>\n"


def message_text(message: Message) -> str:
    """One message, from <|im_start|> to the line end after <|im_end|>."""
    if message.role == "tool":
        return f"<|im_start|>tool\n<tool_response>\n{message.text}\n</tool_response><|im_end|>\n"
    calls = (
        f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments_json}}}\n</tool_call>'
        for call in message.calls
    )
    body = "\n".join([*([message.text] if message.text else []), *calls])
    return f"<|im_start|>{message.role}\n{body}<|im_end|>\n"


def training_row(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """Token ids of the messages, and for each whether the model has to produce it."""
    ids: list[int] = []
    produced: list[bool] = []
    for message in messages:
        text = message_text(message)
        if message.role == "assistant":
            for part, own in (
                (GENERATION_PROMPT, False),
                (text[len(GENERATION_PROMPT) : -1], True),
                ("\n", False),
            ):
                tokens = tokenizer.encode(part, add_special_tokens=False).ids
                ids += tokens
                produced += [own] * len(tokens)
        else:
            tokens = tokenizer.encode(text, add_special_tokens=False).ids
            ids += tokens
            produced += [False] * len(tokens)
    return ids, produced
