"""An OpenAI-compatible server in front of the engine: train somebody else's agent without changing it.

protocol.py     a request's JSON → `ChatRequest`, or the error that the OpenAI API would give
messages.py     the messages and tools in it, reduced to what a chat template may see
session.py      what was sampled for one key or path: the record that training reads
splice.py       messages → prompt ids: an extension of a recorded call where that is proven, else a branch
completion.py   one request: prompt, samples, record
response.py     the answer as JSON, whole or as a stream
server.py       routes, keys, errors
"""

from rollout.gateway.server import Gateway, GatewaySettings

__all__ = ["Gateway", "GatewaySettings"]
