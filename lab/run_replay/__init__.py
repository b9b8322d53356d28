"""Replay of a whole run with rollouts made ahead: trained again, with real sampling, by the run's own log"""
