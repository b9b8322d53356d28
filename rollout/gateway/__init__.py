"""OpenAI-compatible server in front of the engine, which trains an existing agent without changes to its code.

protocol.py     conversion of a request's JSON to a `ChatRequest`, or to the error that the OpenAI API would give
messages.py     its messages and tools, checked and reduced to the keys that a chat template may see
session.py      record of the calls of one key or path, which training reads
splice.py       messages to prompt ids: an extension of a recorded call where proven, else a branch
completion.py   sampling and recording of the answers to a request
response.py     conversion of a completion to JSON, whole or as a stream
server.py       routes, keys, errors
"""

from rollout.gateway.server import Gateway, GatewaySettings

__all__ = ["Gateway", "GatewaySettings"]
