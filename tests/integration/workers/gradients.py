"""Back-propagate one fixed batch as the trainer does, and write the gradients instead of stepping.

Started by tests/integration/test_gradients.py, by itself or by `accelerate launch`:

    gradients.py MODEL_DIR OUT.npz ALGORITHM[,ALGORITHM...] TOKEN_BUDGET
"""

import sys

import numpy as np
import torch

from rollout.records import EngineCall, FinishReason, Rollout, VersionSpan
from trainer.advantages import ADVANTAGES
from trainer.batch import decode, encode
from trainer.config import AlgorithmConfig, Config
from trainer.correction import correction_weights
from trainer.distributed import Distributed
from trainer.policy import Policy
from trainer.update import Targets, Updater

NORMALIZER = {"grpo": "grpo", "dr_grpo": "dr_grpo", "dapo": "token", "gspo": "grpo", "cispo": "token",
              "sapo": "sequence_sum", "clipped_tis": "token", "reinforce": "dr_grpo"}  # fmt: skip
LOSS = {"grpo": "ppo_clip", "dr_grpo": "ppo_clip", "dapo": "ppo_clip"}


def fixed_rollouts() -> list[Rollout]:
    """Nine rollouts in three groups: unequal lengths, several turns, two of them branched, one without reward."""
    rng = np.random.default_rng(0)

    def call(prompt: tuple[int, ...], length: int) -> EngineCall:
        return EngineCall(
            prompt_ids=prompt,
            sampled_ids=tuple(rng.integers(5, 200, length).tolist()),
            sampled_logprobs=tuple((-6 + rng.normal(0, 0.3, length)).clip(max=0).tolist()),
            finish_reason=FinishReason.STOP,
            version_spans=(VersionSpan(version=0, start=0, end=length),),
        )

    rollouts = []
    for rollout_id in range(9):
        first = call(tuple(rng.integers(5, 200, 6).tolist()), int(rng.integers(2, 30)))
        calls = [first]
        if rollout_id % 2:
            calls.append(call((*first.all_ids, 7, 8, 9), int(rng.integers(1, 20))))
        if rollout_id in (3, 4):  # history edited: a branch of its own
            calls.append(call((*first.prompt_ids, 11, 12), int(rng.integers(1, 20))))
        rollouts.append(
            Rollout(
                rollout_id=rollout_id, group_id=rollout_id // 3, calls=tuple(calls), reward=float(rng.integers(0, 2))
            )
        )
    return rollouts


class GradientsOnly(Distributed):
    """Keeps the gradients of the update in place of making it."""

    gradients: dict[str, np.ndarray]

    def step(self, lr: float) -> float:
        named = dict(self.unwrapped.named_parameters())
        if self.uses_deepspeed:
            from deepspeed.utils import safe_get_full_grad

            full = {name: safe_get_full_grad(parameter) for name, parameter in named.items()}
            self.module.optimizer.zero_grad()
        else:
            full = {name: parameter.grad for name, parameter in named.items()}
        self.gradients = {name: grad.detach().float().cpu().numpy().copy() for name, grad in full.items()}
        if not self.uses_deepspeed:
            self.module.zero_grad()
        return 0.0


def main(model_dir: str, out: str, algorithms: str, token_budget: str) -> None:
    distributed = GradientsOnly.start(dtype="float32", max_grad_norm=0.0)
    torch.manual_seed(0)
    policy = Policy.from_pretrained(model_dir)
    module = distributed.prepare(policy, torch.optim.SGD(policy.parameters(), lr=1.0))
    rollouts = fixed_rollouts()
    mine = [rollout for rollout in rollouts if rollout.rollout_id % distributed.world_size == distributed.rank]
    batch = decode(distributed.gather_bytes(encode(mine, mask_truncated=False)))
    result: dict[str, np.ndarray] = {}
    for name in algorithms.split(","):
        settings = AlgorithmConfig(loss=LOSS.get(name, name), normalizer=NORMALIZER[name], clip_low=0.05, clip_high=0.1)
        config = Config(algorithm=settings, token_budget=int(token_budget))
        updater = Updater(module, distributed, config)
        scored = updater.score(batch)
        # Off-policy on purpose: ratios must differ from 1, or clipping and sequence levels would not be seen.
        old = scored + 0.15 * torch.from_numpy(np.random.default_rng(1).normal(size=len(scored))).float()
        advantages_S, _ = ADVANTAGES["grpo"](torch.from_numpy(batch.rewards_S), torch.from_numpy(batch.group_S))
        weights = correction_weights(
            old, batch.sampling_logprobs_N, batch.rollout_N, batch.num_rollouts, mode="token_truncate"
        )
        config.correction.logp_old = "given"  # neither recomputed nor bypassed: sequence ratios need their own pass
        updater.update(batch, Targets.of(batch, advantages_S, old, weights))  # in place of the step: see above
        result |= {f"{name}/{parameter}": grad for parameter, grad in distributed.gradients.items()}
        result[f"{name}/scored"] = scored.numpy()
    if distributed.is_main:
        np.savez(out, **result)
    distributed.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
