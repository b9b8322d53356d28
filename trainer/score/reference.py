"""The frozen reference policy: a copy of the initial model, or the policy with its LoRA adapters disabled.

It exists only if `algorithm.kl_coef` is not 0. A copy is sharded like the policy under ZeRO-3, and whole on every rank
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.schema import Config
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.model.decoder import decoder_setup
from lockstep.trainer.model.policy import Policy, is_adapted, policy_of
from lockstep.trainer.score.scorer import Scorer

if TYPE_CHECKING:
    from lockstep.trainer.batch.packed_images import ImageSource


class Reference:
    """Scorer of log π_ref."""

    def __init__(self, scorer: Scorer, frozen: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        """frozen: context in which the scorer's module computes the reference."""
        self._scorer = scorer
        self._frozen = frozen

    def score(self, batch: StepBatch) -> Tensor:
        """Return the (N,) logprobs of the trained tokens of a step; a collective."""
        with self._frozen():
            return self._scorer.score(batch)


def make_reference(
    config: Config, distributed: Distributed, module: nn.Module, images: ImageSource | None = None
) -> Reference | None:
    """Make the configured reference; a collective under ZeRO-3. module: policy from `Distributed.prepare`. images: of
    the rows.

    It computes as the policy does, so that the KL of an unchanged policy is exactly 0: in bfloat16 over float32 weights
    like the policy under autocast (norms stay float32 there), in bfloat16 throughout if DeepSpeed has cast the policy.
    With compiled layers it is 0 up to the rounding between compiled passes with and without gradients.
    """
    if not config.algorithm.kl_coef:
        return None
    policy = policy_of(distributed.unwrapped)
    settings: dict[str, Any] = {
        "temperature": config.rollout.temperature,
        "token_budget": config.pack_tokens,
        "share_prefixes": config.share_prefixes,
        "with_routes": False,  # it chooses its experts itself
        "images": images,
    }
    if is_adapted(policy.model) and config.model.reference_path is None:
        return Reference(Scorer(module, distributed, **settings), policy.model.disable_adapter)
    copy = Policy.from_pretrained(
        config.model.reference_path or config.model.path,
        dtype=config.model.dtype if distributed.uses_deepspeed else "float32",
        is_compiled=config.model.is_compiled,
        trust_remote_code=config.model.trust_remote_code,
        setting="model.reference_path",
        **decoder_setup(config.model, config.rotary_context) | {"gradient_checkpointing": False},
    )
    return Reference(Scorer(distributed.prepare_frozen(copy), distributed, **settings))
