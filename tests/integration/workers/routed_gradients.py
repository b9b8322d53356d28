"""Back-propagate one fixed batch with given routes as the trainer does; write gradients and the policy's own routes.

Started by tests/integration/test_routed_gradients.py, by itself or by `accelerate launch`:

    routed_gradients.py MODEL_DIR OUT.npz TOKEN_BUDGET [checkpointing] [apart]
"""

import sys
from dataclasses import replace

import numpy as np
import torch

from lockstep.rollout.records import EngineCall, Rollout, Routes
from lockstep.trainer.batch.dealt_batch import dealt
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.credit.correction import StepCorrection
from lockstep.trainer.credit.old_policy import FromEngine, Recomputed
from lockstep.trainer.credit.targets import Logprobs, rollout_targets
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.score.reference import make_reference
from lockstep.trainer.update.updater import Updater
from tests.integration.workers.gradients import GradientsOnly, fixed_rollouts, settings_of

LAYERS, EXPERTS = 2, 4


def with_routes(call: EngineCall) -> EngineCall:
    """Return the call with routes that depend on the ids up to each token, as those of a model do."""
    sums = np.cumsum(call.all_ids[:-1])[:, None] + np.arange(LAYERS)
    own = np.stack([sums % EXPERTS, (sums + 1) % EXPERTS], -1).astype(np.uint8)
    return replace(call, routes=Routes(own=own))


def routed_rollouts() -> list[Rollout]:
    return [replace(rollout, calls=tuple(map(with_routes, rollout.calls))) for rollout in fixed_rollouts()]


def main(model_dir: str, out: str, token_budget: str, *flags: str) -> None:
    distributed = GradientsOnly.start(dtype="float32", max_grad_norm=0.0)
    torch.manual_seed(0)
    policy = Policy.from_pretrained(model_dir, gradient_checkpointing="checkpointing" in flags)
    module = distributed.prepare(policy, torch.optim.SGD(policy.parameters(), lr=1.0))
    config = Config(algorithm=settings_of("grpo"), token_budget=int(token_budget))
    config.model.path = model_dir
    config.share_prefixes = "never" if "apart" in flags else "auto"
    updater = Updater(module, distributed, config)
    own = dealt(StepBatch.of(routed_rollouts(), mask_truncated=False), distributed)
    batch = dealt(StepBatch.of(routed_rollouts(), mask_truncated=False, with_routes=True), distributed)
    reference = make_reference(config, distributed, module)
    assert reference is not None
    own_N, _, recorded = updater.scorer.score_with(own, routes=True)
    scored_N = updater.scorer.score(batch)
    noise = torch.from_numpy(np.random.default_rng(1).normal(size=(2, len(scored_N)))).float()
    old_N = scored_N + 0.15 * noise[0]
    logprobs = Logprobs(old=Recomputed(old_N), ref_N=scored_N + 0.2 * noise[1])
    correction = StepCorrection.of(batch, logprobs.old, CorrectionConfig(mode="token_truncate"))
    targets, _ = rollout_targets(batch, logprobs, correction, config.algorithm)
    updater.update(batch, replace(targets, old=FromEngine(old_N)))
    result = {
        "own": own_N.numpy(),
        "scored": scored_N.numpy(),
        "reference": reference.score(batch).numpy(),
    }
    result |= {f"gradient/{name}": gradient for name, gradient in distributed.gradients.items()}
    if distributed.is_main:  # the others have some of the rows
        result["recorded"] = np.concatenate([row.routes for row in recorded.rows if row.routes is not None])
        np.savez(out, **result)
    distributed.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
