"""A client for Responses: connections and runs, and the agent loop on top of them (`agent`).

It knows the wire and nothing of the server. Everything that a program needs is named here.
"""

from protocol.client.connection import Connection, connect, list_models
from protocol.client.errors import ClientError, ConnectionLost, ServerError
from protocol.client.run import Items, Run

__all__ = [
    "ClientError",
    "Connection",
    "ConnectionLost",
    "Items",
    "Run",
    "ServerError",
    "connect",
    "list_models",
]
