"""Instruments around training: they examine losses, environments, saved runs and numbers, and train reward models.

The rest of the library does not import them. A run finds the pages of its tracker by the entry points `lockstep.media`.
"""
