"""Checks of the trainer on a GPU that computes on the CPU (tests/fixtures/fake_gpu.py).

    python -m tests.integration.workers.fake_gpu DIRECTORY [CHECK ...]

Started by tests/integration/test_fake_gpu.py, in a process of its own because of the stub that is loaded before torch.
Each check is a function; DIRECTORY/found.json gets its error, or null. A check scores a batch, updates on it with
Accelerate and a fused optimizer, saves and reads a checkpoint, and reads the weights as they are staged for the
engines. It holds the record of the device against what is expected (which kernels, in which dtype, how often the host
waits) and the scores against the same weights in float32 on the CPU. The last checks plant a fault, which must be
found.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.fixtures.fake_gpu import Record, fake_gpu, load_stub

CHECKS: dict[str, Callable[[Path], None]] = {}
"""All checks by name."""
SYNCS_PER_MICROBATCH = 1
"""Host syncs that a further microbatch may add to a scoring pass or an update: the copy of its logprobs, after the last
microbatch has been queued."""
SYNCS_PER_UPDATE = 10
"""Host syncs of an optimizer step beside those: sums of the terms, and the gradient norm."""
FAMILIES_OF_CHECKS = (
    "qwen2", "qwen3", "gemma2", "gemma3", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "falcon_h1",
)  # fmt: skip
WITHOUT_KERNEL = ("gemma2", "gpt_oss")
"""Families whose attention (softcaps, sinks) is written out."""
IN_FLOAT32 = {
    "qwen3_next": {("bmm", "float32"), ("bmm", "bfloat16+float32")},  # backward of the delta rule
    "falcon_h1": {("bmm", "float32")},  # the scan of states
    "deepseek_v3": {("mm", "float32")},  # the router, except under autocast
}
"""Products that the authors of a family compute in float32."""
MEAN_ERROR = 0.04
"""Largest mean difference of logprobs from float32 [nats]: rounding to bfloat16 gives 0.006 to 0.027, a window that is
one key too short 0.07 or more."""


def check(function: Callable[[Path], None]) -> Callable[[Path], None]:
    CHECKS[function.__name__] = function
    return function


def rollouts(number: int = 6, length: int = 12) -> list[Any]:
    """Return rollouts of two groups, each with one prompt."""
    import numpy as np

    from lockstep.rollout.records import EngineCall, FinishReason, Rollout, RolloutStatus

    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(5, 200, 40).tolist()) for _ in range(2)]
    made = []
    for index in range(number):
        size = length + 3 * index
        call = EngineCall(
            prompt_ids=prompts[index % 2],
            sampled_ids=tuple(rng.integers(5, 200, size).tolist()),
            sampled_logprobs=tuple((-6 + rng.normal(0, 0.5, size)).tolist()),
            finish_reason=FinishReason.STOP,
        )
        made.append(
            Rollout(
                rollout_id=index,
                group_id=index % 2,
                calls=(call,),
                reward=float(index % 3),
                status=RolloutStatus.COMPLETED,
            )
        )
    return made


@dataclass
class Ran:
    """Records of a run, by stage, and what it computed."""

    scored: Record
    updated: Record
    staged: Record
    microbatches: int
    grad_norm: float
    logprobs: Any
    error: float
    """Mean absolute difference of the logprobs from those of the same weights in float32 on the CPU [nats]."""


def run(
    directory: Path,
    model: Any,
    *,
    autocast: bool = True,
    token_budget: int = 4096,
    lora: bool = False,
    checkpointing: bool = False,
    support: bool = False,
    cast: Callable[[Any], object] | None = None,
) -> Ran:
    """Make a step of training as a run does; raises for tensors of two devices, and for a changed buffer.

    autocast: False for bfloat16 weights, as DeepSpeed has them, which `cast` (`cast_parameters`) makes.
    """
    import copy

    import torch
    from accelerate.state import AcceleratorState

    from lockstep.rollout.models.computed_buffers import wrong_buffer
    from lockstep.rollout.weights.source import ZeroSource
    from lockstep.trainer.batch.step_batch import StepBatch
    from lockstep.trainer.config.groups.model_settings import LoraConfig
    from lockstep.trainer.config.schema import Config
    from lockstep.trainer.credit.correction import StepCorrection
    from lockstep.trainer.credit.old_policy import Recomputed
    from lockstep.trainer.credit.targets import Targets
    from lockstep.trainer.distributed.distributed import Distributed
    from lockstep.trainer.model.lora import add_adapters
    from lockstep.trainer.model.policy import Policy
    from lockstep.trainer.update.optimizers.optimizer import make_optimizer
    from lockstep.trainer.update.updater import Updater

    config = Config(token_budget=token_budget)
    config.model.dtype = "bfloat16"
    model = copy.deepcopy(model)
    if lora:
        model = add_adapters(model, LoraConfig(rank=4))
    policy = Policy(model, compute_dtype="bfloat16", gradient_checkpointing=checkpointing)
    batch = StepBatch.of(rollouts(), mask_truncated=False)
    exact = _on_cpu(model, batch, config, support=support)
    if not autocast:
        (cast or cast_parameters)(policy)
    AcceleratorState._reset_state(reset_partial_state=True)
    with fake_gpu() as record:
        distributed = Distributed.start(dtype="bfloat16" if autocast else "float32", max_grad_norm=1.0)
        module = distributed.prepare(policy, make_optimizer(policy, config.optimizer))
        assert {parameter.device.type for parameter in policy.parameters()} == {"cuda"}
        assert (wrong := wrong_buffer(policy.causal_lm)) is None, f"the buffer {wrong}"
        updater = Updater(module, distributed, config)
        if support:
            _with_support(updater)
        record.clear()
        logprobs = updater.scorer.score(batch)
        scored = _taken(record)
        corrected = StepCorrection.of(batch, Recomputed(logprobs), config.correction)
        advantages_N = torch.linspace(-1, 1, batch.layout.num_tokens)
        targets = Targets(advantages_N=advantages_N, old=Recomputed(logprobs), correction=corrected)
        record.clear()
        metrics = updater.update(batch, targets).metrics
        updated = _taken(record)
        directory.mkdir(exist_ok=True)
        distributed.save_state(directory)
        distributed.load_state(directory)
        record.clear()
        staged = dict(ZeroSource(policy.model, dtype=torch.bfloat16))
        assert {tensor.device.type for tensor in staged.values()} == {"cuda"}
        wide = {
            name for name, tensor in staged.items() if tensor.is_floating_point() and tensor.dtype != torch.bfloat16
        }
        assert wide <= {name for name, _ in model.named_buffers()}, f"staged in another dtype: {wide}"
        return Ran(
            scored=scored,
            updated=updated,
            staged=_taken(record),
            microbatches=int(metrics["perf/microbatches"]),
            grad_norm=metrics["optim/grad_norm"],
            logprobs=logprobs,
            error=float((logprobs - exact).abs().mean()),
        )


def cast_parameters(policy: Any) -> None:
    """Give a policy bfloat16 weights, as DeepSpeed does, and leave its buffers."""
    import torch

    for parameter in policy.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)


def _on_cpu(model: Any, batch: Any, config: Any, *, support: bool) -> Any:
    """Return the logprobs of a copy of the model in float32, without a GPU."""
    import copy

    from accelerate.state import AcceleratorState

    from lockstep.trainer.config.schema import Config
    from lockstep.trainer.distributed.distributed import Distributed
    from lockstep.trainer.model.policy import Policy
    from lockstep.trainer.update.optimizers.optimizer import make_optimizer
    from lockstep.trainer.update.updater import Updater

    AcceleratorState._reset_state(reset_partial_state=True)
    policy = Policy(copy.deepcopy(model))
    distributed = Distributed.start(dtype="float32", max_grad_norm=1.0)
    module = distributed.prepare(policy, make_optimizer(policy, config.optimizer))
    updater = Updater(module, distributed, Config(token_budget=config.token_budget))
    if support:
        _with_support(updater)
    return updater.scorer.score(batch)


def _taken(record: Record) -> Record:
    taken = replace(record)
    record.clear()
    return taken


def _with_support(updater: Any) -> None:
    """Give every trained token a support of its own id and two others, as truncated sampling does."""
    import torch

    packed_of = updater.scorer.packed

    def packed(*args: Any) -> Any:
        pack = packed_of(*args)
        ids = torch.stack([pack.target_ids_T, (pack.target_ids_T + 7) % 512, (pack.target_ids_T + 99) % 512], 1)
        offsets = torch.arange(len(ids) + 1, device=ids.device) * 3
        return replace(pack, support_offsets=offsets, support_ids=ids.flatten())

    updater.scorer.packed = packed


def model_of(family: str, **changes: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from tests.fixtures.families import FAMILIES

    torch.manual_seed(0)
    config = FAMILIES[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    return AutoModelForCausalLM.from_config(config)


def assert_products(ran: Ran, *, has_experts: bool, allowed: set[tuple[str, str]] = frozenset()) -> None:  # type: ignore[assignment]
    for record in (ran.scored, ran.updated):
        kinds = set(record.products)
        wide = {(name, dtype) for name, dtype in kinds if dtype != "bfloat16"} - allowed
        assert not wide, f"products that are not of bfloat16 operands: {wide}"
        assert ("mm", "bfloat16") in kinds or ("addmm", "bfloat16") in kinds
        assert (("_grouped_mm", "bfloat16") in kinds) == has_experts, kinds


def assert_kernel(ran: Ran, *, layers: int, width: int | None, windows: set[int] | None = None) -> None:
    """Each layer calls the kernel once per pass, in bfloat16; with width None never, and never torch's own.

    windows: how many earlier keys a query sees, -1 for all; None: not compared.
    """
    import torch

    for record in (ran.scored, ran.updated):
        expected = 0 if width is None else layers * ran.microbatches
        assert len(record.attention) == expected, f"{len(record.attention)} calls of the kernel, expected {expected}"
        assert {(dtype, wide) for dtype, wide, _ in record.attention} <= {(torch.bfloat16, width)}
        assert windows is None or {window for *_, window in record.attention} == windows, record.attention
        assert record.math_attention == 0, f"{record.math_attention} calls of attention without the kernel"


def assert_syncs(few: Ran, many: Ran) -> None:
    """Hold the waits of one microbatch and of several against the bounds."""
    assert few.microbatches == 1 < many.microbatches
    more = many.microbatches - few.microbatches
    for name in ("scored", "updated"):
        one, several = getattr(few, name), getattr(many, name)
        assert several.num_syncs - one.num_syncs <= SYNCS_PER_MICROBATCH * more, (one.syncs, several.syncs)
    assert few.updated.num_syncs <= SYNCS_PER_MICROBATCH + SYNCS_PER_UPDATE, few.updated.syncs
    assert few.scored.num_syncs <= SYNCS_PER_MICROBATCH, few.scored.syncs
    assert few.staged.num_syncs == 0, few.staged.syncs


def both(directory: Path, model: Any, **settings: Any) -> tuple[Ran, Ran]:
    """Run with one microbatch and with several."""
    return run(directory, model, **settings), run(directory, model, token_budget=100, **settings)


def assert_numbers(few: Ran, many: Ran) -> None:
    assert abs(few.grad_norm / many.grad_norm - 1) < 0.02, (few.grad_norm, many.grad_norm)
    for ran in (few, many):
        assert ran.error < MEAN_ERROR, f"logprobs differ from float32 by {ran.error:.3g} on average"


def _check_family(directory: Path, family: str, *, autocast: bool) -> None:
    model = model_of(family)
    few, many = both(directory, model, autocast=autocast)
    layers = sum(kind.endswith("attention") and "linear" not in kind for kind in layer_types(model))
    kernel = None if family in WITHOUT_KERNEL else width_of(model)
    for ran in (few, many):
        assert_kernel(ran, layers=layers, width=kernel)
        assert_products(ran, has_experts=has_grouped_experts(family), allowed=IN_FLOAT32.get(family, set()))
    assert_syncs(few, many)
    assert_numbers(few, many)


def layer_types(model: Any) -> list[str]:
    config = model.config.get_text_config()
    types = config.to_dict().get("layer_types") or ["full_attention"] * config.num_hidden_layers
    return ["full_attention" if kind == "hybrid" else kind for kind in types]


def width_of(model: Any) -> int:
    """Return the width of the heads that the kernel is given: of latent attention, that of queries."""
    text = model.config.get_text_config().to_dict()
    if "qk_nope_head_dim" in text:
        return text["qk_nope_head_dim"] + text["qk_rope_head_dim"]
    return text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]


def has_grouped_experts(family: str) -> bool:
    from tests.unit.trainer.model.layers.test_experts import GROUPED

    return family in GROUPED


for _family in FAMILIES_OF_CHECKS:
    for _autocast in (True, False):
        CHECKS[f"{_family} {'under autocast' if _autocast else 'with bfloat16 weights'}"] = (
            lambda directory, family=_family, autocast=_autocast: _check_family(directory, family, autocast=autocast)
        )


def _wide_model(width: int, window: int | None) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    windowed = {"use_sliding_window": True, "sliding_window": window, "layer_types": ["sliding_attention"] * 2}
    config = Qwen3Config(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=width, initializer_range=0.12, **(windowed if window else {}),
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


for _width in (64, 128, 256):
    for _window in (None, 9, 45):

        def _check_width(directory: Path, width: int = _width, window: int | None = _window) -> None:
            for autocast in (True, False):
                ran = run(directory, _wide_model(width, window), autocast=autocast)
                assert_kernel(ran, layers=2, width=width, windows={-1 if window is None else window - 1})
                assert ran.error < MEAN_ERROR, ran.error

        CHECKS[f"heads of {_width}, window {_window}"] = _check_width


@check
def supports_add_one_wait_per_microbatch_and_none_per_tile(directory: Path) -> None:
    from lockstep.trainer.model.head import logit_tiles

    model = model_of("qwen3")
    with mock.patch.object(logit_tiles, "TILE_K", 64):  # eight tiles
        whole, supported = run(directory, model), run(directory, model, support=True)
    for name in ("scored", "updated"):  # backward shares the edges of the pairs with forward
        before, after = getattr(whole, name), getattr(supported, name)
        assert after.num_syncs - before.num_syncs <= 1, (before.syncs, after.syncs)
    assert supported.error < MEAN_ERROR, supported.error


@check
def adapters_and_gradient_checkpointing_run_on_one_device(directory: Path) -> None:
    for family, settings in (
        ("qwen3", {"lora": True}),
        ("qwen3", {"checkpointing": True}),
        ("qwen3_next", {"checkpointing": True}),
    ):
        few, many = both(directory, model_of(family), **settings)
        assert_products(few, has_experts=family != "qwen3", allowed=IN_FLOAT32.get(family, set()))
        assert_syncs(few, many)
        assert_numbers(few, many)


@check
def a_buffer_in_bfloat16_is_found(directory: Path) -> None:
    def cast_all(policy: Any) -> None:
        policy.bfloat16()

    assert_fails("the buffer .*inv_freq", run, directory, model_of("qwen3"), autocast=False, cast=cast_all)


@check
def a_tensor_on_the_wrong_device_is_found(directory: Path) -> None:
    from lockstep.trainer.batch.packing import PackedBatch

    to = PackedBatch.to

    def forgetful(packed: PackedBatch, device: Any) -> PackedBatch:
        return replace(to(packed, device), target_ids_T=packed.target_ids_T)

    with mock.patch.object(PackedBatch, "to", forgetful):
        assert_fails("two devices", run, directory, model_of("qwen3"))


@check
def a_sync_per_token_is_found(directory: Path) -> None:
    from lockstep.trainer.model.policy import Policy

    score = Policy.score

    def slow(policy: Policy, hidden: Any, packed: Any, **settings: Any) -> Any:
        sum(float(one) for one in packed.target_ids_T)
        return score(policy, hidden, packed, **settings)

    with mock.patch.object(Policy, "score", slow):
        few, many = both(directory, model_of("qwen3"))
        assert_fails("slow|float", assert_syncs, few, many)


@check
def an_expert_in_float32_is_found(directory: Path) -> None:
    from lockstep.trainer.model.layers import experts

    with mock.patch.object(experts, "operand_dtype", return_value=None):
        ran = run(directory, model_of("qwen3_moe"))
    assert_fails("_grouped_mm", assert_products, ran, has_experts=True)


@check
def a_kernel_that_is_not_called_is_found(directory: Path) -> None:
    from lockstep.trainer.model.layers import packed_attention

    with mock.patch.object(packed_attention.autocast, "cast", lambda *operands: operands):
        ran = run(directory, model_of("qwen3"))
    assert_fails("0 calls of the kernel", assert_kernel, ran, layers=2, width=32)


def assert_fails(says: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with pytest.raises((AssertionError, RuntimeError), match=says):
        function(*args, **kwargs)


def main(directory: Path, names: list[str]) -> None:
    load_stub()
    found = {}
    for name in names or CHECKS:
        try:
            CHECKS[name](directory / "state")
            found[name] = None
        except Exception:  # a check may fail in any way; the others still run
            found[name] = traceback.format_exc()[-3000:]
    (directory / "found.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
