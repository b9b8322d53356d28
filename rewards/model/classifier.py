"""Sequence classifier with one output as a reward model: token sequences in, scalars out.

Decoders (a head named `score` over a causal trunk, as transformers builds them) are read at the last real token, found
by the mask. Transformers' own pooling looks for the last id that is not the padding id, and misses a sampled token with
that id. Other classifiers (encoders) go through their own forward.

A reward model that Lockstep trained has its normalization folded into its weights where they can hold it;
`reward_normalization.json` holds the rest.

Shape legend: _B sequences, _T padded length, _D hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from lockstep.rewards.model.padding import PaddedBatch, pad
from lockstep.rewards.model.wide_linear import widen
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.models.loading import load_model
from lockstep.rollout.models.stored_model import REWARD_MODEL
from lockstep.rollout.replies import read_json, read_number
from lockstep.rollout.system.plain_files import read_plain

NORMALIZATION_FILE = "reward_normalization.json"
"""File beside the weights: gain and bias that normalize the rewards, and the part of the bias not in the weights."""


class RewardModel(nn.Module):
    """Scores of padded batches, without any gain and bias that the weights do not hold."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises `ConfigError` for a classifier with more than one output."""
        super().__init__()
        refuse_labels(model.config, type(model).__name__)
        self.model = model
        score = dict(model.named_children()).get("score")
        if type(score) is nn.Linear:
            widen(score)

    @property
    def is_decoder(self) -> bool:
        return "score" in dict(self.model.named_children())

    def forward(self, ids_BT: Tensor, mask_BT: Tensor, position_ids_BT: Tensor) -> Tensor:
        """Return scores, (B,) float32 or wider. Arguments: the fields of a `PaddedBatch`.

        The head of a decoder computes in float32 or wider; that of another classifier has the precision of the model.
        """
        if not self.is_decoder:
            scores_B = self.model(input_ids=ids_BT, attention_mask=mask_BT.long()).logits[:, 0]
        else:
            trunk = self.model.base_model
            arguments = {"input_ids": ids_BT, "attention_mask": mask_BT.long(), "use_cache": False}
            if "position_ids" in inspect.signature(trunk.forward).parameters:
                arguments["position_ids"] = position_ids_BT
            hidden_BTD = trunk(**arguments).last_hidden_state
            last_B = PaddedBatch(ids_BT, mask_BT, position_ids_BT).last_B.to(hidden_BTD.device)
            last_BD = hidden_BTD[torch.arange(len(ids_BT), device=last_B.device), last_B]
            scores_B = self.model.get_submodule("score")(last_BD)[:, 0]
        return scores_B.to(torch.promote_types(scores_B.dtype, torch.float32))

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]], *, batch_size: int) -> Tensor:
        """Return scores, (B,) on CPU, in the order of the sequences. Sorts by length inside to pad little."""
        device = next(self.parameters()).device
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
        scores_B = torch.zeros(len(sequences))
        for start in range(0, len(order), batch_size):
            indices = order[start : start + batch_size]
            batch = pad([sequences[i] for i in indices]).to(device)
            scores_B[indices] = self(*batch).float().cpu()
        return scores_B


def refuse_labels(config: PreTrainedConfig, name: str) -> None:
    """Raise `ConfigError` for a classifier with more than one output. name: of the model, for the error."""
    if config.num_labels != 1:
        raise ConfigError(
            f"a reward model has one output, {name} has {config.num_labels} labels; name a model with num_labels=1 in "
            "its config.json"
        )


def load_reward_model(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = "float32",
    trust_remote_code: bool = False,
) -> tuple[RewardModel, float]:
    """Load a model in eval mode; return it with the bias to add to its scores.

    device: `auto` spreads the layers over the visible GPUs, for a model that does not fit on one. Raises `ConfigError`:
    the path cannot be loaded, or the model has more than one output.
    """
    model = load_model(
        REWARD_MODEL,
        path,
        setting="reward.settings.model.path",
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        device_map="auto" if device == "auto" else None,
    )
    if device != "auto":
        model.to(device)  # type: ignore[arg-type]  # stubs of transformers
    return RewardModel(model).eval().requires_grad_(False), remaining_bias(path)


def remaining_bias(path: str | Path) -> float:
    """Return the part of the bias that is not in the weights; 0 for models that Lockstep did not train.

    Raises `ConfigError` for a damaged file.
    """
    file = Path(path) / NORMALIZATION_FILE
    try:
        return read_number(read_json(read_plain(file))["remaining_bias"]) if file.is_file() else 0.0
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"reward.settings.model.path={path}: {NORMALIZATION_FILE} has no number `remaining_bias` "
            f"({type(error).__name__}: {error}); restore the file that the training wrote"
        ) from error
