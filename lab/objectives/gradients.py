"""Gradients of several objectives on the rows of one optimizer step, and their weight on every token.

The loss of each objective is that of the update (`OptimizerStep.loss`), and so are masks, denominators and terms. A
pack is run forward once for all objectives and backward once for each, which gives ∂loss/∂log π of its tokens and the
gradient of its parameters. Packs hold rows of one group: the gradient of a step is the sum of those of its groups.

Dimensions: _O objectives, _G groups, _P trained parameters (flat), _N trained tokens of the step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.trainer.batch.packing import PackedBatch
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.score.scorer import Scorer
from lockstep.trainer.update.components.component import TokenSet
from lockstep.trainer.update.optimizer_step import OptimizerStep


class SharedForward(nn.Module):
    """The trained module, which runs each pack once for all objectives."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._packed: PackedBatch | None = None
        self._outputs: dict[tuple[str, ...], Any] = {}

    def forward(self, packed: PackedBatch, **arguments: Any) -> Any:
        if packed is not self._packed:
            self._packed, self._outputs = packed, {}
        names = tuple(sorted(arguments))  # of equal values: objectives share temperature and teacher
        if names not in self._outputs:
            self._outputs[names] = self.module(packed, **arguments)
        return self._outputs[names]


class TrialSteps(Distributed):
    """`Distributed` that can take an optimizer step back."""

    def trial(self, gradient_P: Tensor, *, lr: float, after: Callable[[], None] | None = None) -> Tensor:
        """Return the (P,) change of the parameters by a step of the optimizer, with its moments and clipping.

        Parameters and moments are afterwards those before. after: called with the step made.
        """
        parameters, before_P = trained(self.module), flat([p.detach() for p in trained(self.module)])
        state = copy.deepcopy(self._optimizer.state_dict())
        for parameter, part in zip(parameters, parts_of(gradient_P, parameters), strict=True):
            parameter.grad = part.to(parameter.device, parameter.dtype, copy=True)  # clipping is in place
        self.step(lr, float(gradient_P.double().norm()))
        change_P = flat([p.detach() for p in parameters]) - before_P
        if after is not None:
            after()
        with torch.no_grad():
            for parameter, part in zip(parameters, parts_of(before_P, parameters), strict=True):
                parameter.copy_(part)
        self._optimizer.load_state_dict(state)
        return change_P


@dataclass(slots=True, kw_only=True, eq=False)
class Measured:
    """Gradient and weights of one objective on a step."""

    halves_2P: Tensor
    """Sums over the groups of both halves, on the host."""
    weights_N: Tensor
    """∂loss/∂log π, 0 outside of the loss mask."""
    squares_G: list[float] = field(default_factory=list)
    """Squared norm of the gradient of each group."""
    sums: dict[str, float] = field(default_factory=dict)
    """Metrics of the policy loss, as sums over its tokens."""

    @property
    def gradient_P(self) -> Tensor:
        return self.halves_2P.sum(0)

    @property
    def norm(self) -> float:
        return norm(self.gradient_P)

    @property
    def signal_to_noise(self) -> float:
        """Σ_{i≠j} g_i·g_j / Σ_i g_i·g_i over the gradients of groups: all divisions into halves at once; NaN without
        a gradient."""
        squares = sum(self.squares_G)
        return self.norm**2 / squares - 1 if squares else float("nan")


def measure(
    step: OptimizerStep,
    module: nn.Module,
    scorer: Scorer,
    token_sets: Sequence[TokenSet],
    groups: Sequence[tuple[Sequence[int], int]],
) -> list[Measured]:
    """Return the gradient of each objective. groups: rows (indices) of each group, and its half, 0 or 1.

    step: made with `SharedForward`. token_sets: of the same rows, one per objective.
    """
    zeros_2P = torch.zeros_like(flat([p.detach() for p in trained(module)])).expand(2, -1)
    zeros_N = zeros_2P.new_zeros(token_sets[0].batch.layout.num_tokens)
    measured = [Measured(halves_2P=zeros_2P.clone(), weights_N=zeros_N.clone()) for _ in token_sets]
    for rows, half in groups:
        group_OP = zeros_2P.new_zeros(len(measured), zeros_2P.shape[1])
        for number, packed, weights_T, gradient_P, sums in backward(step, module, scorer, token_sets, rows):
            group_OP[number] += gradient_P
            measured[number].weights_N[packed.token_index_T] += weights_T.to(zeros_N)
            for name, value in sums.items():
                measured[number].sums[name] = measured[number].sums.get(name, 0.0) + value
        for one, gradient_P in zip(measured, group_OP, strict=True):
            one.halves_2P[half] += gradient_P
            one.squares_G.append(norm(gradient_P) ** 2)
    return measured


def backward(
    step: OptimizerStep, module: nn.Module, scorer: Scorer, token_sets: Sequence[TokenSet], rows: Sequence[int]
) -> Iterator[tuple[int, PackedBatch, Tensor, Tensor, dict[str, float]]]:
    """Yield objective (index), pack, (T,) ∂loss/∂log π, (P,) gradient on the host, and sums, for each pack of rows."""
    parameters, batch = trained(module), token_sets[0].batch
    for pack in scorer.share(batch, rows).packs:
        packed = scorer.packed(batch, pack)
        for number, tokens in enumerate(token_sets):
            loss, logp_T, all_sums = step.loss(tokens, packed)
            weights_T, *gradients = torch.autograd.grad(
                loss, [logp_T, *parameters], retain_graph=True, allow_unused=True, materialize_grads=True
            )
            sums: Mapping[str, Tensor] = reduce(lambda x, y: {**x, **y}, all_sums.values(), {})
            scalars = {name: float(value) for name, value in sums.items() if value.ndim == 0}
            yield number, packed, weights_T, flat(gradients), scalars


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate on the host, in float32 at least."""
    dtype = reduce(torch.promote_types, {tensor.dtype for tensor in tensors}, torch.float32)
    return torch.cat([tensor.to("cpu", dtype).flatten() for tensor in tensors])


def parts_of(flat_P: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    parts = flat_P.split([parameter.numel() for parameter in parameters])
    return [part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]


def dot(a_P: Tensor, b_P: Tensor) -> float:
    """Return the inner product, summed in float64."""
    return float(a_P.double() @ b_P.double())


def norm(a_P: Tensor) -> float:
    return dot(a_P, a_P) ** 0.5
