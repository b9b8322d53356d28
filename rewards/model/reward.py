"""Reward model as a reward function: `reward.functions=[model] reward.settings.model.path=<directory or hub id>`.

A batch of rollouts is scored in one call, in batches of `batch_size`. Its input:

    input=messages   the conversation through the reward model's chat template (for classifiers off the hub)
    input=tokens     the prompt and the sampled tokens of the last call, cut after the first stop token that counts;
                     decoded and encoded again if the tokenizers differ (for reward models trained on such text)

With `by_turn` a rollout gets one reward per turn: of the conversation up to the end of the turn, or of the prompt and
the sampled tokens of its call.

A response without a stop token that counts is rejected: a fixed value replaces its score, since a penalty could be
outweighed by a high score. Only the score sees the cut: the policy samples past every stop token, and all of it is
trained.

Source of cut and rejection: Ziegler et al. 2019 (arXiv 1909.08593), section 3.1.1; "The N Implementation Details of
RLHF with PPO" (Hugging Face blog, 2023), "Rejection sampling".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from lockstep.rewards.batches import BatchReward
from lockstep.rewards.model.classifier import load_reward_model
from lockstep.rewards.model.settings import ModelSettings
from lockstep.rewards.model.tokenizing import chat_ids, text_ids
from lockstep.rollout.chat.chat import load_tokenizer
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import Message, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """Rule that the first of `token_ids` at index `after` or later ends the response."""

    token_ids: frozenset[int]
    after: int = 0
    """First index (from 0) at which a stop token counts."""

    def __post_init__(self) -> None:
        if not self.token_ids or self.after < 0:
            raise ValueError(
                f"stop rule: found {len(self.token_ids)} stop tokens and after={self.after}; "
                "expected at least one stop token and an index from 0"
            )

    def end(self, ids: Sequence[int]) -> int | None:
        """Return the number of tokens up to and including the stop token, or None without one."""
        return next((i + 1 for i in range(self.after, len(ids)) if ids[i] in self.token_ids), None)

    def truncate(self, ids: Sequence[int]) -> list[int]:
        """Return the tokens up to and including the stop token; all of them without one."""
        return list(ids[: self.end(ids)])

    def accepts(self, ids: Sequence[int]) -> bool:
        """True if the response has a stop token that counts."""
        return self.end(ids) is not None


@dataclass(frozen=True, kw_only=True)
class ModelReward(ModelSettings):
    """A reward model; `load` or the first `score` loads it, so that ranks that do not score never do."""

    def score(self, rollouts: Sequence[Rollout]) -> list[float] | list[list[float]]:
        """Return one reward per rollout, or with `by_turn` a list of one per turn.

        Raises `ConfigError`: the model or its tokenizer cannot be loaded or used. ValueError: with `by_turn`, messages
        that lack the turns.
        """
        if not self.by_turn:
            return self._scores([(rollout, -1) for rollout in rollouts])
        turns = [(rollout, turn) for rollout in rollouts for turn in range(rollout.num_turns)]
        scores = iter(self._scores(turns))
        return [[next(scores) for _ in rollout.calls] for rollout in rollouts]

    def _scores(self, turns: Sequence[tuple[Rollout, int]]) -> list[float]:
        """Return the reward of each turn. turns: rollouts with the index of a call."""
        if not turns:
            return []
        model, bias = self._model
        texts = [self._input_ids(rollout, turn)[-self.max_tokens :] for rollout, turn in turns]
        scores = (model.score(texts, batch_size=self.batch_size) + bias).tolist()
        rule = self._stop_rule
        if rule is None:
            return scores
        return [
            score if rule.accepts(rollout.calls[turn].sampled_ids) else self.rejected
            for score, (rollout, turn) in zip(scores, turns, strict=True)
        ]

    def check(self) -> None:
        """Load the tokenizers. Raises `ConfigError` if they, the stop or the device cannot be used."""
        _ = self._policy_tokenizer, self._stop_rule
        if self.input == "messages" and not self._tokenizer.chat_template:
            raise ConfigError(
                f"reward.settings.model.path={self.path} has no chat template; name a model with one, or set "
                "reward.settings.model.input=tokens"
            )
        try:
            device = torch.device(self.device if self.device not in (None, "auto") else "cpu")
        except (RuntimeError, TypeError):
            device = None
        if device is None or (device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()):
            raise ConfigError(
                f"reward.settings.model.device={self.device}: found {torch.cuda.device_count()} GPUs; set "
                "reward.settings.model.device=null for that of the process, or cpu"
            )

    def load(self) -> None:
        """Load model and tokenizers, outside the deadline of the first call."""
        _ = self._model
        self.check()

    def _input_ids(self, rollout: Rollout, turn: int) -> list[int]:
        """Return the input of the reward model as its own token ids. turn: index of a call."""
        if self.input == "messages":
            messages = messages_up_to(rollout, turn) if self.by_turn else rollout.messages
            return chat_ids(self._tokenizer, messages)
        rule, call = self._stop_rule, rollout.calls[turn]
        response = call.sampled_ids
        ids = [*call.prompt_ids, *(response if rule is None else rule.truncate(response))]
        if self.policy_path is None:
            return ids
        text = self._policy_tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text_ids(self._tokenizer, str(text))

    @cached_property
    def _model(self):
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        return load_reward_model(self.path, device=device, dtype=self.dtype, trust_remote_code=self.trust_remote_code)

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        return self._load_tokenizer("path", self.path)

    @cached_property
    def _policy_tokenizer(self) -> PreTrainedTokenizerFast:
        if self.policy_path is None:
            return self._tokenizer
        return self._load_tokenizer("policy_path", self.policy_path)

    def _load_tokenizer(self, name: str, path: str) -> PreTrainedTokenizerFast:
        setting = f"reward.settings.model.{name}"
        return load_tokenizer(path, setting=setting, trust_remote_code=self.trust_remote_code, template=None)

    @cached_property
    def _stop_rule(self) -> StopRule | None:
        if self.stop is None:
            return None
        return StopRule(token_ids=frozenset({token_id_of(self._policy_tokenizer, self.stop)}), after=self.stop_after)


def messages_up_to(rollout: Rollout, turn: int) -> tuple[Message, ...]:
    """Return the conversation up to the end of a turn, the index of a call.

    Raises ValueError: a call is in no message, as those of sub-agents, and of agents whose conversation branches.
    """
    ends = [end for end in rollout.places if end is not None]
    if len(ends) < rollout.num_turns:
        raise ValueError(
            f"{len(ends)} of {rollout.num_turns} calls are in a message of the conversation; set "
            "reward.settings.model.input=tokens"
        )
    return rollout.messages[: ends[turn] + 1]


def token_id_of(tokenizer: PreTrainedTokenizerFast, text: str) -> int:
    """Return the id of the token with exactly this text; after a space it may differ (in GPT-2 "." is 13, " ." is not).

    Raises `ConfigError`: the text is not a single token.
    """
    ids = text_ids(tokenizer, text, special_tokens=False)
    if len(ids) != 1:
        raise ConfigError(
            f"reward.settings.model.stop={text!r} is {len(ids)} tokens of {tokenizer.name_or_path}; "
            "choose a text that is one token, for example '.'"
        )
    return ids[0]


def model_reward(**settings: Any) -> BatchReward:
    """Return the reward function `model`. Keyword arguments: the fields of `ModelSettings`, which checks them."""
    reward = ModelReward(**settings)
    return BatchReward(function=reward.score, arguments=lambda rollouts: {"rollouts": rollouts}, load=reward.load)
