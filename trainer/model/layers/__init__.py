"""Layers of the decoder on packed rows: attention, recurrent layers, routers of experts."""
