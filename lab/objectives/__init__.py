"""Gradients of several objectives and corrections on one saved step, compared."""
