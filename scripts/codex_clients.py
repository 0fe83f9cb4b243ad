"""The task that scripts.check_codex gives to Codex, and the ways in which Codex can talk to the server.

It knows versions of Codex and their configuration; it starts nothing. A new way is one more entry of CLIENTS.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TypeAlias

Item: TypeAlias = dict[str, str]

TASK = "Sort my notes into sorted.txt, and change two into zwei in notes.txt."
COMMAND = "sort notes.txt | tee sorted.txt"
PATCH = "*** Begin Patch\n*** Update File: notes.txt\n@@\n one\n-two\n+zwei\n*** End Patch"
FAREWELL = "The notes are sorted, and two is zwei now."

# Nothing but this server: no updates, no analytics, no web search.
CONFIG = """\
model = "forced:codex"
model_provider = "fermata"
approval_policy = "never"
sandbox_mode = "danger-full-access"
web_search = "disabled"
check_for_update_on_startup = false
suppress_unstable_features_warning = true

[analytics]
enabled = false

[model_providers.fermata]
name = "fermata"
base_url = "http://127.0.0.1:{port}/v1"
env_key = "FERMATA_KEY"
wire_api = "responses"
requires_openai_auth = false
request_max_retries = 0
stream_max_retries = 0
{provider}

[features]
{features}
"""


def _shell(command: str) -> Item:
    """A call of Codex's shell."""
    return {"type": "function_call", "name": "exec_command", "arguments": json.dumps({"cmd": command})}


PATCH_TOOL: Item = {"type": "custom_tool_call", "name": "apply_patch", "input": PATCH}
PATCH_COMMAND = _shell(f"apply_patch <<'EOF'\n{PATCH}\nEOF")


@dataclass(frozen=True, slots=True)
class Client:
    """What a version of Codex needs to be told, and how it and the server should talk during the task."""

    lifecycle: str  # of the Responses
    version: str
    provider: dict[str, object]  # settings of the provider, as JSON: TOML has the same booleans and numbers
    patch: Item  # how it lets a model make a patch
    betas: tuple[str | None, ...]  # what its requests say in OpenAI-Beta; a WebSocket is one request
    asks: tuple[str, ...]  # the types of its messages, in order
    continues: tuple[int | None, ...]  # which Response each of them names as the one before, counted from 0
    ends: tuple[str, ...]  # of the server's legs, in order
    legs: tuple[int, ...]  # of each Response
    features: tuple[str, ...] = ()  # to turn on

    @property
    def script(self) -> list[list[Item]]:
        """What the model says, leg by leg."""
        return [
            [{"type": "message", "content": "First the notes in order."}, _shell(COMMAND)],
            [{"type": "message", "content": "Now the change."}, self.patch],
            [{"type": "message", "content": FAREWELL}],
        ]

    def config(self, port: int) -> str:
        """Codex's config.toml, for a server on this port of loopback."""
        return CONFIG.format(
            port=port,
            provider="\n".join(f"{name} = {json.dumps(value)}" for name, value in self.provider.items()),
            features="\n".join(f"{name} = true" for name in self.features),
        )


_CLIENTS = (
    Client(
        lifecycle="held",
        version="0.107.0",
        provider={"supports_websockets": True},
        features=("responses_websockets", "apply_patch_freeform"),
        patch=PATCH_TOOL,
        betas=("responses_websockets=2026-02-04",),
        asks=("response.create", "response.append", "response.append"),
        continues=(None, None, None),
        ends=("response.done", "response.done", "response.completed"),
        legs=(3,),
    ),
    Client(
        lifecycle="chained",
        version="0.171.0",
        # A warm-up that takes longer than the connecting may is given up, and its connection with it.
        provider={"supports_websockets": True, "websocket_connect_timeout_ms": 600_000},
        patch=PATCH_COMMAND,
        betas=("responses_websockets=2026-02-06",),
        asks=("response.create",) * 4,  # the first is the warm-up
        continues=(None, 0, 1, 2),
        ends=("response.completed",) * 4,
        legs=(0, 1, 1, 1),
    ),
    Client(
        lifecycle="stateless",
        version="0.171.0",
        provider={"supports_websockets": False},
        patch=PATCH_COMMAND,
        betas=(None,) * 3,
        asks=("body",) * 3,
        continues=(None, None, None),
        ends=("response.completed",) * 3,
        legs=(1, 1, 1),
    ),
)
CLIENTS = {client.lifecycle: client for client in _CLIENTS}
