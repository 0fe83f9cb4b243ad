"""The network edge: one port for HTTP and WebSocket, who may use it, and how requests and replies are framed.

It knows heads, bodies and text frames; what Responses are it is told by whatever is behind it (`backend`).
"""
