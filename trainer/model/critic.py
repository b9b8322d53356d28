"""The critic: what a state is worth, at the positions where the policy is trained.

The value of a trained token is that of the state *before* it, so it is read from the hidden state at
`target_index_T`, the same that predicts the token. A critic has a decoder of its own (`separate`) or reads the policy's
hidden states (`shared`: one pass of the trunk serves both, and the value loss reaches the trunk).

Policy and critic are one module, so that one DeepSpeed engine and one optimizer train both and ZeRO-3 shards both.

Shape legend: _L tokens of the pack, _T trained tokens of the pack, _D hidden size.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForTokenClassification, PreTrainedConfig, PreTrainedModel

from trainer.batch.packing import PackedBatch
from trainer.config.schema import Config
from trainer.model.decoder import AUTO, compile_layers, packable_config, packed_hidden_states, prepare
from trainer.model.policy import Policy


class ValueHead(nn.Module):
    """Hidden states to values: one linear layer, zero at first, so that V = 0 at step 0 (P2).

    Random first values would be noise that GAE hands to the policy as advantages.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1)
        self.reset()

    @classmethod
    def of(cls, linear: nn.Linear) -> ValueHead:
        """A head that was trained before, its parameters shared with `linear`."""
        head = cls(linear.in_features)
        head.linear = linear
        return head

    @torch.no_grad()
    def reset(self) -> None:
        self.linear.weight.zero_()
        self.linear.bias.zero_()

    def forward(self, hidden_TD: Tensor) -> Tensor:
        """(T,) values, float32 or wider: returns are sums, which half precision rounds away."""
        values_T = self.linear(hidden_TD)[:, 0]
        return values_T.to(torch.promote_types(values_T.dtype, torch.float32))


class Critic(nn.Module):
    """A decoder of its own under a value head."""

    def __init__(
        self,
        decoder: PreTrainedModel,
        head: ValueHead | None = None,
        *,
        attn_implementation: str = AUTO,
        gradient_checkpointing: bool = False,
        is_compiled: bool = False,
        compute_dtype: torch.dtype | str | None = None,
    ) -> None:
        """As `Policy`; head: None for a new one. Raises ConfigError if rows of a pack cannot be kept apart."""
        super().__init__()
        prepare(
            decoder,
            attn_implementation=attn_implementation,
            gradient_checkpointing=gradient_checkpointing,
            compute_dtype=compute_dtype,
        )
        if is_compiled:
            compile_layers(decoder)
        self.decoder = decoder
        self.head = head or ValueHead(decoder.config.get_text_config().hidden_size)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype | str = torch.float32,
        attn_implementation: str = AUTO,
        gradient_checkpointing: bool = False,
        is_compiled: bool = False,
        trust_remote_code: bool = False,
        compute_dtype: torch.dtype | str | None = None,
    ) -> Critic:
        """A critic from a checkpoint: of a critic (trainer/model/critic_saving.py), whose head goes on, or of a policy
        or a reward model, whose decoder gets a new head.

        Raises:
            ConfigError: nothing loadable is there, or the model is not a decoder whose rows can be packed.
        """
        config = packable_config(
            path,
            setting="model.critic_path",
            expected=(
                "a directory with config.json and weights, the name of a model on the hub, or null for the policy's "
                "own weights"
            ),
            trust_remote_code=trust_remote_code,
        )
        head = None
        if is_critic(config):
            model = AutoModelForTokenClassification.from_pretrained(
                path, dtype=dtype, trust_remote_code=trust_remote_code
            )
            decoder, head = model.base_model, ValueHead.of(model.get_submodule(head_name(model)))
        else:
            decoder = AutoModel.from_pretrained(path, dtype=dtype, trust_remote_code=trust_remote_code)
        return cls(
            decoder,
            head,
            attn_implementation=attn_implementation,
            gradient_checkpointing=gradient_checkpointing,
            is_compiled=is_compiled,
            compute_dtype=compute_dtype,
        )

    def forward(self, packed: PackedBatch) -> Tensor:
        """(T,) value of the state before each trained token of the pack."""
        hidden_LD = packed_hidden_states(self.decoder, packed)
        return self.head(hidden_LD.index_select(0, packed.target_index_T))


def is_critic(config: PreTrainedConfig) -> bool:
    """Whether a checkpoint has one value per token: a classifier of tokens with one label."""
    return config.num_labels == 1 and any("ForTokenClassification" in name for name in config.architectures or ())


def head_name(classifier: PreTrainedModel) -> str:
    """Where a classifier of tokens keeps its linear layer: `score` in most decoders, `classifier` in GPT-2."""
    return next(name for name, child in classifier.named_children() if isinstance(child, nn.Linear))


class ActorCritic(nn.Module):
    """Policy and critic as one module. Hand it whole to `Distributed.prepare`."""

    def __init__(self, policy: Policy, critic: Critic | ValueHead) -> None:
        """critic: a `Critic`, or a `ValueHead` on the policy's own trunk."""
        super().__init__()
        self.policy = policy
        self.critic = critic

    @classmethod
    def shared(cls, policy: Policy) -> ActorCritic:
        """A value head on the policy's trunk."""
        weight = next(policy.causal_lm.get_decoder().parameters())
        head = ValueHead(policy.causal_lm.config.get_text_config().hidden_size)
        return cls(policy, head.to(weight.device, weight.dtype))

    def forward(
        self,
        packed: PackedBatch,
        *,
        temperature: float = 1.0,
        with_entropy: bool = True,
        with_values: bool = False,
    ) -> tuple[Tensor, ...]:
        """logp_T and entropy_T as `Policy.forward`, and with `with_values` also values_T.

        A pack without trained tokens gives empty tensors that still reach every parameter in backward.
        """
        if not with_values:
            return self.policy(packed, temperature=temperature, with_entropy=with_entropy)
        if isinstance(self.critic, Critic):
            scored = self.policy(packed, temperature=temperature, with_entropy=with_entropy)
            return (*scored, self.critic(packed))
        hidden_LD = self.policy.hidden_states(packed)
        scored = self.policy.score(hidden_LD, packed, temperature=temperature, with_entropy=with_entropy)
        return (*scored, self.critic(hidden_LD.index_select(0, packed.target_index_T)))


def with_critic(policy: Policy, config: Config) -> Policy | ActorCritic:
    """What a run trains: the policy, and beside it the critic that the configuration asks for."""
    if not config.has_critic:
        return policy
    if config.model.critic == "shared":
        return ActorCritic.shared(policy)
    critic = Critic.from_pretrained(
        config.model.critic_path or config.model.path,
        dtype="float32",
        attn_implementation=config.attention,
        gradient_checkpointing=config.model.gradient_checkpointing,
        is_compiled=config.model.compile,
        trust_remote_code=config.model.trust_remote_code,
        compute_dtype=config.model.dtype,
    )
    return ActorCritic(policy, critic)


def policy_of(module: nn.Module) -> Policy:
    """The policy inside what a run trains, with or without a critic."""
    policy = module.policy if isinstance(module, ActorCritic) else module
    assert isinstance(policy, Policy)
    return policy
