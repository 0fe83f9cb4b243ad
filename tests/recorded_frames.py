"""What two coding agents were recorded to send, with their keys, shapes and sizes, and texts of our own.

The *append* client keeps one Response over its tool calls: `response.create`, then `response.append`. The
*chained* client begins with a warm-up and sends `previous_response_id`, tools and what is new every time.
"""

from __future__ import annotations

import json
from typing import Any

Json = dict[str, Any]

SESSION = "0f6d2f5e-7c1a-4b63-9d53-6f1d0a7c2b11"
_SENTENCE = "Read the file before you change it, and say what you did in one short line. "

APPEND_HEADERS = (
    "authorization: Bearer KEY",
    "originator: codex_exec",
    "openai-beta: responses_websockets=2026-02-04",
    f"session_id: {SESSION}",
    "sec-websocket-extensions: permessage-deflate; client_max_window_bits",
)
OLDEST_HEADERS = tuple(header for header in APPEND_HEADERS if "beta" not in header)
CHAINED_HEADERS = (
    "authorization: Bearer KEY",
    "user-agent: codex_exec/0.171.0 (Debian 12.0.0; x86_64) xterm (codex_exec; 0.171.0)",
    "originator: codex_exec",
    "openai-beta: responses_websockets=2026-02-06",
    f'x-codex-turn-metadata: {{"session_id":"{SESSION}"}}',
    "x-codex-beta-features: remote_compaction_v2",
    f"x-client-request-id: {SESSION}",
    f"session-id: {SESSION}",
    f"thread-id: {SESSION}",
    f"x-codex-window-id: {SESSION}:0",
    "sec-websocket-extensions: permessage-deflate; client_max_window_bits",
)


def prose(characters: int) -> str:
    """A text of this many characters."""
    return (_SENTENCE * (characters // len(_SENTENCE) + 1))[:characters]


def function(name: str, *properties: str, size: int) -> Json:
    """A function tool whose JSON has this many characters."""
    tool: Json = {
        **{"type": "function", "name": name, "description": "", "strict": False},
        "parameters": {
            "type": "object",
            "properties": {each: {"type": "string", "description": "a text"} for each in properties},
            "required": list(properties[:1]),
            "additionalProperties": False,
        },
    }
    tool["description"] = prose(size - len(json.dumps(tool)))
    return tool


def message(role: str, *sizes: int, **fields: Any) -> Json:
    """A message with parts of these many characters."""
    parts = [{"type": "input_text", "text": prose(size)} for size in sizes]
    return {"type": "message", **fields, "role": role, "content": parts}


GRAMMAR = 'start: begin_patch hunk+ end_patch\nbegin_patch: "*** Begin Patch" LF\n'
APPLY_PATCH: Json = {
    "type": "custom",
    "name": "apply_patch",
    "description": prose(100),
    "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR + "// " + prose(500)},
}
ASKING = ("questions", "header", "id", "options", "label", "description")
APPEND_TOOLS: list[Json] = [
    function("exec_command", "cmd", "justification", "login", "shell", "tty", "workdir", size=2155),
    function("write_stdin", "session_id", "chars", "yield_time_ms", size=709),
    function("update_plan", "plan", "explanation", size=661),
    function("request_user_input", *ASKING, size=1419),
    APPLY_PATCH,
    {"type": "web_search", "external_web_access": True},
    function("view_image", "path", size=437),
]
AGENT_TOOLS = ("close_agent", "resume_agent", "send_input", "spawn_agent", "wait_agent")
CHAINED_TOOLS: list[Json] = [
    function("exec_command", "cmd", "justification", "login", "shell", "tty", "workdir", size=1594),
    function("write_stdin", "session_id", "chars", "yield_time_ms", size=819),
    function("request_user_input", *ASKING, size=1419),
    function("view_image", "path", size=391),
    {
        **{"type": "namespace", "name": "multi_agent_v1", "description": prose(40)},
        "tools": [function(name, "target", size=2180) for name in AGENT_TOOLS],
    },
    function("get_goal", size=297),
    function("create_goal", "goal", size=784),
    function("update_goal", "goal", "status", size=2187),
    {"type": "web_search", "external_web_access": True},
]
PATCHING_TOOLS: list[Json] = [
    *(tool for tool in CHAINED_TOOLS if tool["type"] != "namespace"),
    APPLY_PATCH,
    {"type": "tool_search", "execution": "client", "description": prose(80), "parameters": {}},
]


def _body(model: str, items: list[Json], tools: list[Json], **fields: Any) -> Json:
    return {
        **{"type": "response.create", "model": model, "stream": True, "input": items, "tools": tools},
        **{"tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"summary": "auto"}},
        **{"store": False, "include": ["reasoning.encrypted_content"], "prompt_cache_key": SESSION},
        **fields,
    }


# ---- the append client


def append_create(model: str) -> Json:
    """Its first frame: 19,682 bytes."""
    frame = _body(
        model,
        [message("developer", 362), message("user", 3024, 181), message("user", 38)],
        APPEND_TOOLS,
        instructions="",
        reasoning={"effort": "medium", "summary": "auto"},
        client_metadata={"x-codex-turn-metadata": prose(67)},
    )
    frame["instructions"] = prose(19_682 - len(json.dumps(frame)))
    return frame


def append(*items: Json, metadata: bool = True) -> Json:
    """What it sends when its tools are done: about 400 bytes."""
    extra = {"client_metadata": {"x-codex-turn-metadata": prose(67)}} if metadata else {}
    return {"type": "response.append", "input": list(items), **extra}


# ---- the chained client


def warm_up(model: str, tools: list[Json]) -> Json:
    """Its first frame: 36,966 bytes with CHAINED_TOOLS."""
    items = [message("developer", 16_979, id="msg_1")]
    return {**_body(model, items, tools), "generate": False, "client_metadata": metadata()}


def empty_warm_up(model: str) -> Json:
    """The same of models that get their tools in another way: 1,429 bytes."""
    frame = _body(model, [], [], reasoning={"effort": "low", "context": "all_turns"})
    del frame["tools"]
    return {**frame, "generate": False, "client_metadata": metadata()}


def first_turn() -> list[Json]:
    """The items that follow a warm-up, or begin a conversation without one."""
    return [
        message("developer", 2131, 362, id="msg_2"),
        message("user", 377, id="msg_3"),
        message("user", 38, id="msg_4"),
    ]


def chained_create(model: str, items: list[Json], tools: list[Json], parent: str | None) -> Json:
    """One of its further frames: 20 kB and what is new."""
    frame = _body(model, items, tools, client_metadata=metadata())
    return frame if parent is None else {**frame, "previous_response_id": parent}


def metadata() -> Json:
    """The metadata that it puts into every frame."""
    return {
        **{"thread_id": SESSION, "session_id": SESSION, "turn_id": "", "x-codex-window-id": SESSION + ":0"},
        **{"x-codex-ws-stream-request-start-ms": "1767225600000", "x-codex-turn-metadata": prose(601)},
    }
