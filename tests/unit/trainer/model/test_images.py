"""Packs with images: every row scores as transformers computes it alone, and no row sees another's images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers.modeling_layers import GradientCheckpointingLayer

from lockstep.rollout.errors import ConfigError, EvidenceError, TrainingError
from lockstep.rollout.media.prepared_image import PreparedImage
from lockstep.rollout.records import EngineCall, FinishReason, Rollout, TrainingRow
from lockstep.trainer.batch.packed_images import GRID, ImageSource
from lockstep.trainer.batch.packing import PackedBatch, collate
from lockstep.trainer.batch.prefixes import MIN_SHARED
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.model_settings import LoraConfig
from lockstep.trainer.model.layers.vision import image_source
from lockstep.trainer.model.lora import add_adapters
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.score.scorer import Scorer
from tests.fixtures.distributed import FakeRank
from tests.fixtures.models import tiny_qwen3
from tests.fixtures.vision_models import (
    PAD,
    VISION_MODELS,
    adds_alike,
    by_digest,
    image,
    image_row,
    images_of,
    rows_of,
    vision_model,
)

TEMPERATURE = 0.7
NAMES = list(VISION_MODELS)
each_model = pytest.mark.parametrize("name", NAMES)


def source_of(policy: Policy, images: Sequence[PreparedImage]) -> ImageSource:
    return image_source(policy.causal_lm.config, by_digest(images))


def pack(policy: Policy, rows: Sequence[TrainingRow], images: Sequence[PreparedImage], **options) -> PackedBatch:
    indices = options.pop("indices", range(len(rows)))
    return collate(rows, indices, images=source_of(policy, images), **options)


def policy_of(name: str, *, dtype: torch.dtype = torch.float32, **settings) -> Policy:
    return Policy(vision_model(name, dtype=dtype), sees_images=True, **settings)


class InFloat64(TorchFunctionMode):
    """Computes in float64 what models compute in float32 whatever their dtype: norms, routers, recurrent layers.

    Their rounding depends on the processor, up to 1.3e-5 in a logprob.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [torch.float64 if one is torch.float32 else one for one in args]
        kwargs = {name: torch.float64 if one is torch.float32 else one for name, one in (kwargs or {}).items()}
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*args, **kwargs)


@pytest.fixture
def in_float64() -> Iterator[None]:
    with InFloat64():
        yield


def assert_scores_are(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare logprobs that are computed `in_float64`."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def score(policy: Policy, packed: PackedBatch) -> torch.Tensor:
    with torch.no_grad():
        return policy(packed, temperature=TEMPERATURE)[0]


def arguments_alone(name: str, row: TrainingRow, images: Sequence[PreparedImage]) -> dict[str, torch.Tensor]:
    """Return the arguments of transformers' own forward for one row."""
    prepared = by_digest(images)
    arguments = {"input_ids": torch.from_numpy(row.ids)[None]}
    if not row.images:
        return arguments
    own = [prepared(span.digest) for span in row.images]
    arguments |= {key: torch.cat([one.tensors[key] for one in own]) for key in own[0].tensors}
    types = "token_type_ids" if name == "gemma3" else "mm_token_type_ids"
    return arguments | {types: (arguments["input_ids"] == PAD).long()}


@torch.no_grad()
def alone(name: str, rows: Sequence[TrainingRow], images: Sequence[PreparedImage]) -> torch.Tensor:
    """Score rows one by one with transformers' own forward: eager attention, full logits, log-softmax."""
    model = vision_model(name, dtype=torch.float64)
    model.set_attn_implementation("eager")
    found = []
    for row in rows:
        logits = model(**arguments_alone(name, row, images), use_cache=False).logits[0]
        targets = np.flatnonzero(row.loss_mask)
        logp = torch.log_softmax(logits / TEMPERATURE, -1)
        found.append(logp[targets - 1, torch.from_numpy(row.ids[targets])])
    return torch.cat(found)


@pytest.mark.usefixtures("in_float64")
@each_model
@pytest.mark.parametrize("attention", ["packed_rows", "sdpa", "eager"])
def test_packed_rows_with_images_score_as_each_row_alone(name: str, attention: str) -> None:
    if name == "gemma3" and attention != "packed_rows":
        with pytest.raises(ConfigError, match=f"attn_implementation={attention}.*attend to all of it"):
            policy_of(name, dtype=torch.float64, attn_implementation=attention)
        return
    images = images_of(name, dtype=torch.float64)
    rows = rows_of(images)
    policy = policy_of(name, dtype=torch.float64, attn_implementation=attention)
    found = score(policy, pack(policy, rows, images))
    assert_scores_are(found, alone(name, rows, images))


@pytest.mark.usefixtures("in_float64")
@each_model
def test_a_changed_image_changes_its_rows_alone(name: str) -> None:
    images = images_of(name, dtype=torch.float64)
    rows = rows_of(images)
    changed = image(name, seed=50, height=4, width=2, dtype=torch.float64)
    (other,) = (replace(rows[2].images[1], digest=changed.digest),)
    changed_rows = [*rows[:2], replace(rows[2], images=(rows[2].images[0], other)), *rows[3:]]
    policy = policy_of(name, dtype=torch.float64)
    packed = pack(policy, rows, images)
    before, after = score(policy, packed), score(policy, pack(policy, changed_rows, [*images, changed]))
    others = packed.rollout_T != 2
    assert torch.equal(before[others], after[others])
    assert (before[~others] - after[~others]).abs().max() > 0.01
    assert_scores_are(after, alone(name, changed_rows, [*images, changed]))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gemma3"])
def test_rotary_positions_are_those_of_transformers(name: str) -> None:
    images = images_of(name)
    rows = rows_of(images)
    policy = policy_of(name)
    packed = pack(policy, rows, images)
    assert packed.images is not None
    assert packed.images.position_ids_3L is not None
    model: Any = policy.causal_lm.base_model
    for row, found in zip(rows, packed.images.position_ids_3L.split(packed.row_lengths, 1), strict=True):
        arguments = arguments_alone(name, row, images)
        ids = arguments["input_ids"]
        types = arguments.get("mm_token_type_ids", torch.zeros_like(ids))
        expected, _ = model.get_rope_index(ids, mm_token_type_ids=types, image_grid_thw=arguments.get(GRID))
        assert torch.equal(found, expected[:, 0])


@each_model
def test_packs_without_images_score_as_those_of_the_text_path(name: str) -> None:
    images = images_of(name)
    rows = [rows_of(images)[i] for i in (0, 3)]
    policy = policy_of(name)
    packed = pack(policy, rows, images)
    with_tower = score(policy, packed)
    policy.vision = None
    assert torch.equal(with_tower, score(policy, packed))


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_rows_of_text_are_apart_in_packs_without_images(attention: str) -> None:
    images = images_of("qwen2_5_vl", dtype=torch.float64)
    rows = [rows_of(images)[i] for i in (0, 3)]
    policy = policy_of("qwen2_5_vl", dtype=torch.float64, attn_implementation=attention)
    found = score(policy, pack(policy, rows, images))
    assert_scores_are(found, alone("qwen2_5_vl", rows, images))


PARTITIONS = [[[0, 1, 2, 3, 4, 5]], [[4, 2], [3, 0], [1, 5]], [[0], [1], [2], [3], [4], [5], []]]


def gradients(
    name: str, packs: Sequence[Sequence[int]], *, trains_tower: bool, share_prefixes: bool = False, **settings
) -> dict[str, torch.Tensor | None]:
    images = images_of(name, dtype=torch.float64)
    rows = rows_of(images)
    policy = policy_of(name, dtype=torch.float64, trains_tower=trains_tower, **settings)
    for indices in packs:
        packed = pack(policy, rows, images, indices=indices, share_prefixes=share_prefixes)
        logp_T, entropy_T = policy(packed, temperature=TEMPERATURE)
        ((1.0 + packed.rollout_T) * logp_T + 0.1 * entropy_T).sum().backward()
    return {name: parameter.grad for name, parameter in policy.named_parameters()}


def assert_equal_gradients(found: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]) -> None:
    for name, gradient in expected.items():
        ours = found[name]
        assert (ours is None) == (gradient is None), name
        if ours is None or gradient is None:
            continue
        if adds_alike(name):
            assert max(ours.norm(), gradient.norm()) < 1e-12, name
            continue
        assert gradient.norm() > 1e-12, name
        assert (ours - gradient).norm() / gradient.norm() < 1e-5, name


def is_of_decoder(name: str) -> bool:
    return "language_model" in name or "lm_head" in name


@each_model
@pytest.mark.parametrize("trains_tower", [False, True], ids=["frozen", "trained"])
def test_gradients_do_not_depend_on_packs(name: str, trains_tower: bool) -> None:
    expected = gradients(name, PARTITIONS[-1], trains_tower=trains_tower)
    trained = {parameter for parameter, gradient in expected.items() if gradient is not None}
    assert trained == {parameter for parameter in expected if trains_tower or is_of_decoder(parameter)}
    for partition in PARTITIONS[:-1]:
        assert_equal_gradients(gradients(name, partition, trains_tower=trains_tower), expected)


@each_model
def test_a_trained_tower_has_the_gradient_of_transformers(name: str) -> None:
    images = images_of(name, dtype=torch.float64)
    rows = rows_of(images)
    model = vision_model(name, dtype=torch.float64)
    for index, row in enumerate(rows):
        logits = model(**arguments_alone(name, row, images), use_cache=False).logits[0]
        logp = torch.log_softmax(logits / TEMPERATURE, -1)
        targets = np.flatnonzero(row.loss_mask)
        entropy = -(logp[targets - 1].exp() * logp[targets - 1]).sum()
        ((1.0 + index) * logp[targets - 1, torch.from_numpy(row.ids[targets])].sum() + 0.1 * entropy).backward()
    expected = {f"model.{name}": parameter.grad for name, parameter in model.named_parameters()}
    assert_equal_gradients(gradients(name, PARTITIONS[0], trains_tower=True), expected)


@each_model
def test_gradient_checkpointing_changes_no_gradient(name: str) -> None:
    found = [gradients(name, PARTITIONS[0], trains_tower=True, gradient_checkpointing=flag) for flag in (False, True)]
    assert_equal_gradients(found[1], found[0])


@each_model
def test_checkpointing_reaches_the_layers_of_a_trained_tower(name: str) -> None:
    images = images_of(name)
    policy = policy_of(name, trains_tower=True, gradient_checkpointing=True)
    layers = [layer for layer in policy.modules() if isinstance(layer, GradientCheckpointingLayer)]
    runs: list[int] = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: runs.append(1))
    policy(pack(policy, rows_of(images), images))[0].sum().backward()
    assert len(layers) == 5, "2 of the tower, 3 of the decoder"
    assert len(runs) == 2 * len(layers), "each layer runs again in backward"


@each_model
@pytest.mark.parametrize("trains_tower", [False, True], ids=["frozen", "trained"])
def test_every_pack_runs_the_tower_and_adds_exact_zeros_without_images(name: str, trains_tower: bool) -> None:
    images = images_of(name)
    policy = policy_of(name, trains_tower=trains_tower)
    runs: list[int] = []
    tower = next(part for part in policy.causal_lm.base_model.children() if part is not policy.causal_lm.get_decoder())
    tower.register_forward_hook(lambda *_: runs.append(1))
    for number, indices in enumerate(([], [0], [3, 0], [1]), 1):
        packed = pack(policy, rows_of(images), images, indices=indices)
        policy(packed)[0].sum().backward()
        assert len(runs) == number
        for parameter_name, parameter in policy.named_parameters():
            if is_of_decoder(parameter_name):
                continue
            assert parameter.requires_grad == trains_tower, parameter_name
            assert (parameter.grad is not None) == trains_tower, parameter_name
            if parameter.grad is not None:
                assert parameter.grad.any() == bool(packed.images), parameter_name


def with_prefixes(name: str, images: Sequence[PreparedImage]) -> tuple[list[TrainingRow], list[PreparedImage]]:
    """Return three rows of a prompt with two images, one whose second image is another, one whose first is; and all
    images."""
    first, second, _, tall = images
    other = image(name, seed=60, height=4, width=2, dtype=torch.float64)
    prompts = [(first, tall)] * 3 + [(first, other), (second, tall)]
    rows = [image_row([MIN_SHARED, one, 3, two, 8], index=index, seed=7) for index, (one, two) in enumerate(prompts)]
    for index, row in enumerate(rows):
        row.ids[-5:] = np.arange(5) + 5 * index + 1
    return rows, [*images, other]


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("qwen3_5")])
def test_shared_prefixes_change_no_score_and_encode_an_image_once(name: str) -> None:
    rows, images = with_prefixes(name, images_of(name, dtype=torch.float64))
    policy = policy_of(name, dtype=torch.float64)
    shared, whole = (pack(policy, rows, images, share_prefixes=flag) for flag in (True, False))
    assert shared.images is not None
    assert whole.images is not None
    assert shared.num_tokens < 0.6 * whole.num_tokens
    key = GRID if GRID in whole.images.tensors else "pixel_values"
    counts = [len(packed_images.tensors[key]) for packed_images in (shared.images, whole.images)]
    assert counts == [5, 10], "the first, two behind it, the second, and one behind that"
    expected = alone(name, rows, images)
    assert_scores_are(score(policy, whole), expected)
    assert_scores_are(score(policy, shared), expected)


def test_a_scorer_packs_the_images_of_its_rows() -> None:
    rows, images = with_prefixes("qwen2_5_vl", images_of("qwen2_5_vl", dtype=torch.float64))
    call = EngineCall(prompt_ids=(1,), sampled_ids=(2,), sampled_logprobs=(-1.0,), finish_reason=FinishReason.STOP)
    rollouts = [Rollout(rollout_id=row.rollout_id, group_id=0, calls=(call,)) for row in rows]
    batch = replace(StepBatch.of(rollouts, mask_truncated=False), rows=tuple(rows))
    policy = policy_of("qwen2_5_vl", dtype=torch.float64)
    source = source_of(policy, images)
    expected = alone("qwen2_5_vl", rows, images)
    for share in ("auto", "never"):
        scorer = Scorer(
            policy, FakeRank(policy), temperature=TEMPERATURE, token_budget=100, share_prefixes=share, images=source
        )
        torch.testing.assert_close(scorer.score(batch).double(), expected, rtol=0, atol=1e-5)  # computed in float32


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
@pytest.mark.parametrize("targets", [None, ["q_proj"]])
def test_adapters_are_on_the_decoder_alone(name: str, targets: list[str] | None) -> None:
    images = images_of(name, dtype=torch.float64)
    rows = rows_of(images)
    adapted = add_adapters(vision_model(name, dtype=torch.float64), LoraConfig(rank=2, target_modules=targets))
    policy = Policy(adapted, sees_images=True)
    found = policy(pack(policy, rows, images), temperature=TEMPERATURE)[0]
    assert_scores_are(found.detach(), alone(name, rows, images))
    found.sum().backward()
    trained = [parameter for parameter, value in policy.named_parameters() if value.grad is not None]
    assert trained == [parameter for parameter, _ in policy.named_parameters() if "lora_" in parameter]
    assert trained
    assert all(map(is_of_decoder, trained))
    with pytest.raises(ConfigError, match="tower stays frozen"):
        Policy(adapted, sees_images=True, trains_tower=True)


def test_a_bare_image_token_is_text() -> None:
    """A model may sample it. It has no image, and a later image keeps its place."""
    images = images_of("qwen2_5_vl")
    row = image_row([5, images[0], 6], index=1)
    row.ids[2] = PAD
    policy = policy_of("qwen2_5_vl")
    packed = pack(policy, [row], images)
    assert packed.images is not None
    assert packed.images.token_index_K.tolist() == list(range(row.images[0].start, row.images[0].end))
    embeddings: Any = policy.causal_lm.get_input_embeddings()
    embeddings.weight.data[PAD] = embeddings.weight.data[9]
    with_pad = score(policy, packed)
    row.ids[2] = 9
    assert torch.equal(with_pad, score(policy, pack(policy, [row], images)))


def test_images_that_do_not_fit_their_row_are_refused_by_digest() -> None:
    images = images_of("qwen2_5_vl")
    policy = policy_of("qwen2_5_vl")
    row = image_row([5, images[0], 6], index=1)
    span = row.images[0]
    with pytest.raises(EvidenceError, match=f"image {span.digest}.* is missing"):
        pack(policy, [row], images[1:])
    with pytest.raises(EvidenceError, match=f"image {span.digest}.*without its vision tower"):
        collate([row], [0])
    wider = replace(row, images=(replace(span, end=span.end + 1),))
    with pytest.raises(EvidenceError, match=f"image {span.digest}.* has 6 tokens"):
        pack(policy, [wider], images)
    with pytest.raises(EvidenceError, match=f"image {span.digest}.* ids are not all"):
        pack(policy, [replace(row, images=(span.shifted(-1),))], images)
    with pytest.raises(EvidenceError, match=f"image {span.digest}.* overlaps"):
        pack(policy, [replace(row, images=(span, span))], images)
    with pytest.raises(EvidenceError, match=f"image {span.digest}.* not within"):
        pack(policy, [replace(row, images=(span.shifted(len(row)),))], images)
    trained = row.loss_mask.copy()
    trained[span.end - 1] = True
    with pytest.raises(EvidenceError, match=f"image {span.digest}.* marked as trained"):
        pack(policy, [replace(row, loss_mask=trained)], images)
    other_grid = replace(images[0], tensors={**images[0].tensors, GRID: torch.tensor([[1, 4, 4]])})
    with pytest.raises(EvidenceError, match=f"image {span.digest}: a grid of"):
        pack(policy, [row], [other_grid])


def test_a_policy_without_its_tower_refuses_images() -> None:
    images = images_of("qwen2_5_vl")
    policy = policy_of("qwen2_5_vl")
    packed = pack(policy, rows_of(images), images)
    policy.vision = None
    with pytest.raises(TrainingError, match="without its vision tower"):
        policy(packed)
    with pytest.raises(ConfigError, match=r"model type qwen3.*model\.path"):
        Policy(tiny_qwen3(tied=True), sees_images=True)


@each_model
def test_a_stored_model_is_loaded_whole(name: str, tmp_path) -> None:
    images = images_of(name)
    rows = rows_of(images)
    vision_model(name).save_pretrained(tmp_path)
    policy = Policy.from_pretrained(tmp_path, sees_images=True)
    again = policy_of(name)
    assert torch.equal(score(policy, pack(policy, rows, images)), score(again, pack(again, rows, images)))
