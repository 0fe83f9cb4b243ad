"""The engine: token ids in, token ids out. It knows nothing of items, JSON or sockets, and never imports trio.

``messages`` and ``handle`` are what the server process imports; neither imports torch.
"""
