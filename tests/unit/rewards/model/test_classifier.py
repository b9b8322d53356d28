"""Sequence classifiers as reward models: where the score is read, and models that lie in several places."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForSequenceClassification, GPT2Config, GPT2ForSequenceClassification

from lockstep.rewards.model.classifier import NORMALIZATION_FILE, RewardModel, load_reward_model, remaining_bias
from lockstep.rewards.model.padding import pad
from lockstep.rollout.errors import ConfigError
from tests.fixtures.reward_models import CLASSIFIERS, gpt2_classifier
from tests.unit.rewards.model.test_padding import padded_left


@pytest.fixture(params=CLASSIFIERS)
def classifier(request):
    return CLASSIFIERS[request.param]()


@pytest.fixture
def saved(tmp_path):
    gpt2_classifier().save_pretrained(tmp_path)
    return tmp_path


@torch.no_grad()
def test_the_score_is_read_at_the_last_real_token_also_where_that_is_the_padding_id(classifier):
    module = RewardModel(classifier)
    rows = [[5, 6, 7, 0], [9, 4], [8, 0, 0]]
    expected = [
        float(classifier(input_ids=torch.tensor([row])).logits.new_tensor(alone(classifier, row))) for row in rows
    ]
    found = module.score(rows, batch_size=2)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-5)
    for batch in (pad(rows), padded_left(rows, 6)):
        torch.testing.assert_close(module(*batch), found, rtol=1e-5, atol=1e-5)


def alone(classifier, row):
    hidden = classifier.base_model(input_ids=torch.tensor([row])).last_hidden_state[0, -1]
    return classifier.score(hidden).item()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"remaining_bias": "x"}', '{"remaining_bias": NaN}', "[" * 9999])
def test_a_damaged_normalization_is_refused(saved, text):
    (saved / NORMALIZATION_FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"reward_normalization\.json has no number"):
        remaining_bias(saved)


def test_a_classifier_with_several_labels_is_refused():
    config = GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=20, num_labels=3)
    with pytest.raises(ConfigError, match="3 labels"):
        RewardModel(GPT2ForSequenceClassification(config))


@torch.no_grad()
def test_a_model_spread_over_devices_scores_like_a_whole_one(saved, tmp_path):
    """As with `device=auto` for a model that does not fit on one GPU; the disk stands in for the second GPU."""
    rows = [[5, 6, 7, 0], [9, 4]]
    expected = load_reward_model(saved)[0].score(rows, batch_size=2)
    torch.testing.assert_close(load_reward_model(saved, device="auto")[0].score(rows, batch_size=2), expected)
    first = ("transformer.wte", "transformer.wpe", "transformer.drop", "transformer.h.0")
    places = dict.fromkeys(first, "cpu") | dict.fromkeys(("transformer.h.1", "transformer.ln_f", "score"), "disk")
    spread = AutoModelForSequenceClassification.from_pretrained(
        saved, device_map=places, offload_folder=tmp_path / "offload", dtype="float32"
    )
    assert spread.get_submodule("score").weight.is_meta, "no layer is elsewhere"
    torch.testing.assert_close(RewardModel(spread).score(rows, batch_size=2), expected)


@torch.no_grad()
def test_the_head_computes_in_float32_under_autocast(classifier):
    classifier.score.weight.mul_(100)
    module = RewardModel(classifier)
    hidden = torch.randn(16, classifier.score.in_features).to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        found = classifier.score(hidden)
        assert module.score([[5, 6, 7]], batch_size=1).dtype == torch.float32
    exact = hidden.double() @ classifier.score.weight.double().T
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)
