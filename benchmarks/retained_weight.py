"""Gradient weight that a correction retains, by length of the rollout: the reason against products as the default.

    python benchmarks/retained_weight.py [--sigma 0.05] [--out docs/images/retained_weight.png]

Synthetic mismatch: log ρ_t = σ x_t − σ²/2 with independent standard normal x_t. Every true weight has mean 1, so the
mean weight after control is the retained share of the gradient. σ = 0.05 is about twice the difference between engine
and trainer in bfloat16 on one token. Bounds as in configs/correction: truncation at 2, masks outside [0.5, 2].

Not covered: mismatch that is correlated along a rollout (staleness), for which the geometric mean falls as well.
"""

from __future__ import annotations

from pathlib import Path

import torch
from harness.results import argument_parser, report

from lockstep.trainer.objective.correction.weights import correction_weights

LENGTHS = tuple(2**n for n in range(4, 15))
GRANULARITIES = {
    "sequence": ("geometric mean", "#3f8f4f", "-"),
    "token": ("per token", "#2f6fab", "--"),
    "sequence_product": ("product", "#b5452c", "-"),
}
"""Label, color and line in the plot."""
CONTROLS = {"truncate": (0.0, 2.0), "mask": (0.5, 2.0)}
NUM_TOKENS = 2**21
"""Tokens per length: 128 rollouts of 16,384 tokens, more of shorter ones."""


def retained(mode: str, bounds: tuple[float, float], length: int, sigma: float) -> float:
    """Return the mean weight over `NUM_TOKENS` tokens."""
    generator = torch.Generator().manual_seed(length)
    log_ratio_T = sigma * torch.randn(NUM_TOKENS, generator=generator) - sigma**2 / 2
    rollout_T = torch.arange(NUM_TOKENS) // length
    result = correction_weights(
        log_ratio_T - 1.0, torch.full_like(log_ratio_T, -1.0), rollout_T, NUM_TOKENS // length, mode=mode, bounds=bounds
    )
    return float(result.weights_T.double().mean())


def plot(table: dict[str, list[float]], sigma: float, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(CONTROLS), figsize=(9, 3.4), sharey=True, layout="constrained")
    for axis, control in zip(axes, CONTROLS, strict=True):
        for granularity, (label, color, line) in GRANULARITIES.items():
            shares = table[f"{granularity}_{control}"]
            axis.plot(LENGTHS, shares, line, marker="o", markersize=3, label=label, color=color)
        low, high = CONTROLS[control]
        axis.set_title(f"truncated at {high:g}" if control == "truncate" else f"masked outside [{low:g}, {high:g}]")
        axis.set_xscale("log", base=2)
        axis.set_xlabel("trained tokens of the rollout")
        axis.set_ylim(0, 1.1)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("retained gradient weight")
    axes[0].legend(title=f"σ = {sigma:g} nats per token", frameon=False, loc="lower left")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=140)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--sigma", type=float, default=0.05, help="standard deviation of log ρ of one token [nats]")
    parser.add_argument("--out", type=Path, help="file for the plot")
    arguments = parser.parse_args()
    lengths = LENGTHS[:3] if arguments.quick else LENGTHS
    shares = {
        f"{granularity}_{control}": [
            retained(f"{granularity}_{control}", bounds, length, arguments.sigma) for length in lengths
        ]
        for granularity in GRANULARITIES
        for control, bounds in CONTROLS.items()
    }
    rows = [
        {"correction": mode, **dict(zip(map(str, lengths), of_mode, strict=True))} for mode, of_mode in shares.items()
    ]
    longest = {f"{mode}_at_{lengths[-1]}": of_mode[-1] for mode, of_mode in shares.items()}
    report("retained_weight", rows, longest, as_json=arguments.json)
    if arguments.out:
        plot(shares, arguments.sigma, arguments.out)
        print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
