"""The engine: token ids in, token ids out. It knows nothing of items, JSON or sockets.

``messages`` is the contract. ``handle``, ``routing`` and ``sequence`` are the server's side of it: they
import trio and never torch. ``worker`` and everything below it is the engine process: it imports torch and
never trio.
"""
