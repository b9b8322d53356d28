"""Settings of the optimizer: `optimizer`."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.trainer.config.conditions import CRITIC, MOMENTUM, SPIKES
from lockstep.trainer.setting import NOT_MEASURED, setting

OPTIMIZERS = ("adamw", "adamw_tf", "adamw_8bit", "muon", "sgd")
SMALL_MODEL_LR = 3e-4
"""`optimizer.lr` where it is null and the model is small."""
MIN_NORMS = 8
"""Minimum number of gradient norms for the median that detects spikes."""


@dataclass
class OptimizerConfig:
    name: str = setting("adamw", "optimizer (trainer/update/optimizers/optimizer.py)", choices=OPTIMIZERS)
    lr: float | None = setting(
        None,
        "peak learning rate; null: 3e-4 for models of at most 50 M parameters, 1e-6 for larger ones, 1e-5 for their "
        "adapters",
        above=0,
    )
    critic_lr: float | None = setting(
        None,
        "peak learning rate of a critic, on the same schedule (adamw, adamw_tf, sgd); null: lr",
        above=0,
        when=CRITIC,
    )
    betas: list[float] = setting([0.9, 0.95], "Adam's moment decays", length=2, low=0, below=1)
    eps: float = setting(1e-8, "Adam's epsilon", above=0)
    momentum: float = setting(0.95, "momentum of muon and sgd", low=0, high=1, when=MOMENTUM)
    weight_decay: float = setting(0.0, "decoupled weight decay, on matrices only", low=0)
    max_grad_norm: float = setting(1.0, "global norm to which gradients are clipped; 0: no clipping", low=0)
    reduce_dtype: str = setting(
        "float32",
        "dtype in which ranks sum gradients, without effect in one process; bfloat16 halves the bytes and rounds each "
        "rank's part",
        choices=("float32", "bfloat16"),
        experimental=NOT_MEASURED,
    )
    schedule: str = setting("constant", "learning rate after warm-up", choices=("constant", "linear", "cosine"))
    warmup_updates: int = setting(0, "updates over which the learning rate rises linearly", low=0)
    final_lr_fraction: float = setting(0.0, "end of linear and cosine, as a fraction of lr", low=0, high=1)
    max_skipped_updates: int = setting(
        5, "consecutive updates skipped for a spike or a non-finite loss or gradient before the run ends", low=1
    )
    spike: str = setting(
        "off",
        "update with a gradient norm far above earlier ones; skip: skip it, dump its batch; dump: only dump its batch",
        choices=("off", "skip", "dump"),
    )
    spike_factor: float = setting(
        10.0, "gradient norm of a spike, as a multiple of the median of earlier ones", low=1, when=SPIKES
    )
    spike_window: int = setting(64, "recent updates for the median of gradient norms", low=MIN_NORMS, when=SPIKES)

    @property
    def peak_lr(self) -> float:
        """lr with null resolved, as long as the model's size has not chosen a lower one."""
        return SMALL_MODEL_LR if self.lr is None else self.lr
