"""Environments in which agents, programs or packages of others play."""
