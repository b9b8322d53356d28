"""The frame in which requests and replies of reward workers travel: a length, then JSON."""

from __future__ import annotations

import struct

LENGTH = struct.Struct("!I")
"""Before each frame: its size in bytes."""
MAX_REPLY_BYTES = 16 * 2**20
"""A verdict has some hundred bytes; what is longer was not written by a worker."""
RECEIVED = LENGTH.pack(0)
"""What a worker sends as soon as it has read a request: if it dies from here on, the function has ended it."""
