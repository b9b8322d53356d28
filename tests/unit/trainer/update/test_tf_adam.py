"""Adam with TensorFlow's place for epsilon."""

from __future__ import annotations

import math

import pytest
import torch

from lockstep.trainer.update.optimizers.tf_adam import tf_epsilon


def tensorflow_adam(gradients, lr, beta1, beta2, epsilon):
    """Return the update that TensorFlow documents, in plain Python."""
    x = m = v = 0.0
    for t, g in enumerate(gradients, 1):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        x -= lr * math.sqrt(1 - beta2**t) / (1 - beta1**t) * m / (math.sqrt(v) + epsilon)
    return x


@pytest.mark.parametrize("kind", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.AdamW])
def test_torch_adam_with_the_epsilon_of_the_step_is_tensorflows(kind, optimizer_class):
    gradients = [3e-5, -1e-6, 2e-4, 1e-5]
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = optimizer_class([parameter], lr=1e-3, betas=(0.9, 0.999), eps=1e-5, weight_decay=0.0, **kind)
    for step, gradient in enumerate(gradients, 1):
        parameter.grad = torch.full_like(parameter, gradient)
        for group in optimizer.param_groups:
            group["eps"] = tf_epsilon(1e-5, group["betas"][1], step)
        optimizer.step()
    assert parameter.item() == pytest.approx(tensorflow_adam(gradients, 1e-3, 0.9, 0.999, 1e-5), rel=1e-9)


def test_the_epsilon_starts_large_and_ends_as_torchs():
    assert tf_epsilon(1e-5, 0.999, 1) == pytest.approx(1e-5 / math.sqrt(0.001))
    assert tf_epsilon(1e-5, 0.999, 100_000) == pytest.approx(1e-5)
