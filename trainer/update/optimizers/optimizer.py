"""Optimizers by name, over the trained parameters of a module.

| name         | optimizer                                                                                         |
|--------------|---------------------------------------------------------------------------------------------------|
| `adamw`      | PyTorch's fused AdamW                                                                             |
| `adamw_tf`   | the same with TensorFlow's place for epsilon (tf_adam.py)                                         |
| `adamw_8bit` | bitsandbytes' AdamW with 8-bit moments: a quarter of AdamW's memory; CUDA only                    |
| `muon`       | orthogonalized momentum for matrices of layers (Jordan et al. 2024), AdamW for all other ones     |
| `sgd`        | SGD with momentum; for tests and comparisons                                                      |

Weight decay acts on matrices only, never on norms, biases and other vectors. Each optimizer keeps all of its state in
its `state_dict`, so a resumed run continues bit for bit.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.config.groups.optimizer_settings import OPTIMIZERS, OptimizerConfig
from lockstep.trainer.config.launcher import MUON_UNDER_ZERO, NO_BITSANDBYTES
from lockstep.trainer.distributed.distributed import IS_CRITIC, IS_HELD, LR_SCALE

CRITIC_PREFIX = "critic."
"""Prefix of a critic's parameters in `lockstep.trainer.model.critic.ActorCritic`."""
NOT_IN_LAYERS = ("embed", "wte", "wpe", "head", "score")
"""Name parts of matrices that do not map between hidden states, to which Muon's theory does not apply."""


def make_optimizer(module: nn.Module, config: OptimizerConfig, *, is_sharded: bool = False) -> torch.optim.Optimizer:
    """Make the configured optimizer over the parameters of an unprepared module that require gradients.

    A step that holds a group (`Distributed.step`) does not count as a step of its parameters. is_sharded: True if ranks
    hold parts of the optimizer's state (ZeRO). Raises `ConfigError` for `adamw_8bit` without bitsandbytes or a GPU, and
    for `muon` on sharded state.
    """
    optimizer = _build(module, config, is_sharded=is_sharded)
    for part in optimizer.parts if isinstance(optimizer, Together) else [optimizer]:
        part.register_step_post_hook(_uncount_held)
    return optimizer


def _build(module: nn.Module, config: OptimizerConfig, *, is_sharded: bool) -> torch.optim.Optimizer:
    parameters = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    lr = config.peak_lr
    critic_scale = (config.critic_lr or lr) / lr
    groups = parameter_groups(parameters, config.weight_decay, critic_scale=critic_scale)
    adam: dict[str, Any] = {"lr": lr, "betas": (config.betas[0], config.betas[1]), "eps": config.eps}
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=config.momentum)
    if config.name == "adamw_tf":
        from lockstep.trainer.update.optimizers.tf_adam import TFAdamW  # other runs do not load it

        return TFAdamW(groups, **adam, fused=True)
    if config.name == "adamw_8bit":
        return _adamw_8bit(groups, adam)
    if config.name == "muon":
        if is_sharded:
            raise ConfigError(MUON_UNDER_ZERO)
        hidden = {n: p for n, p in parameters if p.ndim == 2 and not any(part in n for part in NOT_IN_LAYERS)}
        others = [(n, p) for n, p in parameters if n not in hidden]
        muon = torch.optim.Muon(
            parameter_groups(hidden.items(), config.weight_decay, critic_scale=critic_scale),
            lr=lr,
            momentum=config.momentum,
            adjust_lr_fn="match_rms_adamw",  # steps of AdamW's size, so that one learning rate serves both
        )
        if not others:
            return muon
        rest = parameter_groups(others, config.weight_decay, critic_scale=critic_scale)
        return Together([muon, torch.optim.AdamW(rest, **adam, fused=True)])
    if config.name != "adamw":
        raise ValueError(f"optimizer {config.name!r}; expected one of {', '.join(OPTIMIZERS)}")
    return torch.optim.AdamW(groups, **adam, fused=True)


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], weight_decay: float, *, critic_scale: float
) -> list[dict[str, Any]]:
    """Group parameters by decay (matrices only) and model: a critic learns at `critic_scale` times the policy's rate,
    or alone."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in named:
        shape = vars(parameter).get("ds_shape", parameter.shape)  # ZeRO-3 leaves parameters empty
        groups.setdefault((name.startswith(CRITIC_PREFIX), len(shape) >= 2), []).append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": weight_decay if is_matrix else 0.0,
            LR_SCALE: critic_scale if is_critic else 1.0,
            IS_CRITIC: is_critic,
            IS_HELD: False,
        }
        for (is_critic, is_matrix), parameters in groups.items()
    ]


class Together(torch.optim.Optimizer):
    """One optimizer from several with their own parameters."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = list(parts)
        super().__init__(list(chain.from_iterable(part.param_groups for part in self.parts)), {})
        self._share_groups()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        assert closure is None, "closures are not supported"
        for part in self.parts:
            part.step()
        return None

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()

    def _share_groups(self) -> None:
        """Expose the parts' own groups, so that a learning rate set there reaches them."""
        self.param_groups = list(chain.from_iterable(part.param_groups for part in self.parts))


def _uncount_held(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Take back the step of parameters in held groups, whose gradients are 0.

    Adam's moments are still 0; with a count of the held steps its bias correction would take these zeros for gradients,
    and misjudge the size of the first real ones. SGD has added the weight decay to its momentum.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get(IS_HELD, False) else ():
            state = optimizer.state.get(parameter, {})
            if "step" in state:
                state["step"] = state["step"] - 1
            if state.get("momentum_buffer") is not None:
                state["momentum_buffer"].zero_()


def _adamw_8bit(groups: list[dict[str, Any]], adam: dict[str, Any]) -> torch.optim.Optimizer:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(NO_BITSANDBYTES)
    if not torch.cuda.is_available():
        raise ConfigError("optimizer.name=adamw_8bit has kernels for CUDA only; set optimizer.name=adamw")
    import bitsandbytes  # type: ignore[import-not-found]  # optional, for GPUs

    return bitsandbytes.optim.AdamW8bit(groups, **adam)
