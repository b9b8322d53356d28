"""The cross-entropy of demonstrations as a component, on rows of their own (trainer/sft/demonstration_rows.py)."""

from __future__ import annotations

from lockstep.trainer.update.components.component import Outputs, Share, Term, mean_over


def demonstrations_component(name: str, *, weight: float, num_tokens: int) -> Term:
    """Return the term of an optimizer step. num_tokens: all trained tokens of its rows, on all ranks."""

    def share(outputs: Outputs) -> Share:
        loss_T = -outputs.logp_T
        entropy = outputs.entropy_T.detach().sum()
        return Share(loss_T=loss_T, sums={f"loss/{name}": loss_T.detach().sum(), f"loss/{name}_entropy": entropy})

    return Term(name=name, weight=weight, num_tokens=num_tokens, normalized=mean_over(num_tokens), share=share)
