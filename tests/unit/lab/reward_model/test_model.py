"""The reward model before training and on disk."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoModelForSequenceClassification, GPT2ForSequenceClassification

from lockstep.lab.reward_model.model import Normalization, bias_place, fold, init_reward_head
from lockstep.rewards.model.classifier import NORMALIZATION_FILE, RewardModel, load_reward_model
from lockstep.rewards.model.padding import pad
from tests.fixtures.reward_models import CLASSIFIERS


def test_the_head_starts_with_the_square_root_in_its_standard_deviation():
    head = torch.nn.Linear(4095, 64)
    init_reward_head(head, generator=torch.Generator().manual_seed(0))
    assert head.weight.std().item() == pytest.approx(1 / math.sqrt(4096), rel=0.01)
    assert head.bias.abs().max() == 0


@pytest.fixture(params=CLASSIFIERS)
def classifier(request):
    return CLASSIFIERS[request.param]()


@torch.no_grad()
def test_auto_model_gives_normalized_rewards_where_the_architecture_can_hold_the_bias(classifier, tmp_path):
    module = RewardModel(classifier)
    normalization = Normalization(gain=3.5, bias=-1.25)
    rows = [[5, 6, 7], [9, 4, 8]]
    expected = normalization(module(*pad(rows)))
    place = bias_place(module)
    state = {name: tensor.clone() for name, tensor in classifier.state_dict().items()}
    classifier.save_pretrained(tmp_path, state_dict=fold(state, module, normalization))
    left = 0.0 if place else normalization.bias
    (tmp_path / NORMALIZATION_FILE).write_text(json.dumps({"gain": 3.5, "bias": -1.25, "remaining_bias": left}))

    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    found = plain(input_ids=torch.tensor(rows)).logits[:, 0]
    torch.testing.assert_close(found + left, expected, rtol=1e-5, atol=1e-5)
    assert (place is not None) == isinstance(classifier, GPT2ForSequenceClassification)

    ours, bias = load_reward_model(tmp_path)
    torch.testing.assert_close(ours.score(rows, batch_size=4) + bias, expected, rtol=1e-5, atol=1e-5)
