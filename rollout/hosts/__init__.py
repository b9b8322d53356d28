"""Hosts: programs in processes of their own, which are asked and can be killed, such as checks of foreign schemas."""
