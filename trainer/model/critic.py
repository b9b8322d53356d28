"""The critic: values of the states at which the policy is trained.

The value of a trained token is that of the state *before* it, so it is read from the hidden state at
`target_index_T`, which also predicts the token. A critic has its own decoder (`separate`) or reads the policy's hidden
states (`shared`: one pass of the trunk serves both, and the value loss reaches the trunk).

Policy and critic are one module, so that one DeepSpeed engine and one optimizer train both and ZeRO-3 shards both.

Shape legend: _L tokens of the pack, _T trained tokens of the pack, _D hidden size.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification, PreTrainedConfig, PreTrainedModel

from lockstep.rewards.model.wide_linear import WideLinear, widen
from lockstep.rollout.models.loading import load_model
from lockstep.rollout.models.stored_model import TRUNK, VALUE_MODEL, Role
from lockstep.trainer.batch.packing import PackedBatch
from lockstep.trainer.config.groups.model_settings import ModelConfig
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.model.decoder import (
    DecoderSetup,
    decoder_setup,
    packable_config,
    packed_hidden_states,
    prepare,
    vision_of,
)
from lockstep.trainer.model.policy import Policy


class ValueHead(nn.Module):
    """A linear layer from hidden states to values, zero at first: GAE would turn random values into noise in the
    advantages ("The N Implementation Details of RLHF with PPO", Hugging Face blog, 2023, "Value head layer
    initialization")."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear: nn.Linear = WideLinear(hidden_size, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        """Return (T,) values, computed in float32 or wider, also under autocast."""
        return self.linear(hidden_TD)[:, 0]


class Critic(nn.Module):
    """A decoder of its own under a value head."""

    def __init__(
        self,
        decoder: PreTrainedModel,
        head: ValueHead | None = None,
        *,
        is_compiled: bool = False,
        **setup: Unpack[DecoderSetup],
    ) -> None:
        """As `Policy`; head: None for a new one. Raises ConfigError if rows of a pack cannot be kept apart."""
        super().__init__()
        prepare(decoder, **setup)
        self.vision = vision_of(decoder, **setup)
        if is_compiled:
            from lockstep.trainer.model.layers.compiled import compile_layers  # other runs do not load it

            compile_layers(decoder.get_decoder())
        self.decoder = decoder
        weight = next(decoder.parameters())  # of bfloat16 under ZeRO-3, which partitions tensors of one dtype only
        self.head = (head or ValueHead(decoder.config.get_text_config().hidden_size)).to(weight.device, weight.dtype)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype | str = torch.float32,
        is_compiled: bool = False,
        trust_remote_code: bool = False,
        **setup: Unpack[DecoderSetup],
    ) -> Critic:
        """Load a critic with its head (`save_critic`), or the decoder of a policy or reward model under a new head."""
        config = packable_config(
            path,
            setting="model.critic_path",
            trust_remote_code=trust_remote_code,
            sees_images=setup.get("sees_images", False),
        )
        model = load_model(
            role_of(config),
            path,
            setting="model.critic_path",
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            config=config,
        )
        if role_of(config) is TRUNK:
            decoder, head = model, None
        else:
            decoder, linear = model.base_model, model.get_submodule(head_name(model))
            assert isinstance(linear, nn.Linear)
            widen(linear)
            head = ValueHead(linear.in_features)
            head.linear = linear
        assert isinstance(decoder, PreTrainedModel)
        return cls(decoder, head, is_compiled=is_compiled, **setup)

    def forward(self, packed: PackedBatch) -> Tensor:
        """Return the (T,) value of the state before each trained token of the pack."""
        inputs = None if self.vision is None else self.vision.inputs(packed)
        hidden_LD = packed_hidden_states(self.decoder.get_decoder(), packed, inputs)
        return self.head(hidden_LD.index_select(0, packed.target_index_T))


def role_of(config: PreTrainedConfig) -> Role:
    """Return the role of a critic's files: a token classifier with one label has its head, others are a trunk."""
    is_critic = config.num_labels == 1 and any("ForTokenClassification" in name for name in config.architectures or ())
    return VALUE_MODEL if is_critic else TRUNK


def head_name(classifier: PreTrainedModel) -> str:
    """Return the name of a token classifier's linear layer: `score` in most decoders, `classifier` in GPT-2."""
    return next(name for name, child in classifier.named_children() if isinstance(child, nn.Linear))


class ActorCritic(nn.Module):
    """Policy and critic as one module. Pass it whole to `Distributed.prepare`."""

    def __init__(self, policy: Policy, critic: Critic | ValueHead) -> None:
        """critic: a `Critic`, or a `ValueHead` on the policy's own trunk."""
        super().__init__()
        self.policy = policy
        self.critic = critic

    @classmethod
    def shared(cls, policy: Policy) -> ActorCritic:
        """Put a value head on the policy's trunk."""
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
        with_routes: bool = False,
        candidate_ids_TE: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return logp_T and entropy_T as `Policy.forward`, with `with_values` also values_T, and then what it adds.

        A separate critic is another model and routes by itself.
        """
        policy = self.policy
        hidden_LD, *routes = policy.traced_states(packed) if with_routes else (policy.hidden_states(packed),)
        logp_T, entropy_T, *others = policy.score(
            hidden_LD,
            packed,
            temperature=temperature,
            with_entropy=with_entropy,
            candidate_ids_TE=candidate_ids_TE,
        )
        if not with_values:
            return (logp_T, entropy_T, *others, *routes)
        if isinstance(self.critic, Critic):
            return (logp_T, entropy_T, self.critic(packed), *others, *routes)
        return (logp_T, entropy_T, self.critic(hidden_LD.index_select(0, packed.target_index_T)), *others, *routes)


def with_critic(
    policy: Policy, model: ModelConfig, *, has_critic: bool, engine_context: int | None
) -> Policy | ActorCritic:
    """Return the module to train: the policy, with a critic if it has one. engine_context: as in `DecoderSetup`."""
    if not has_critic:
        return policy
    if model.critic == "shared":
        return ActorCritic.shared(policy)
    critic = Critic.from_pretrained(
        model.critic_path or model.path,
        dtype="float32",
        is_compiled=model.is_compiled,
        trust_remote_code=model.trust_remote_code,
        **decoder_setup(model, engine_context),
    )
    return ActorCritic(policy, critic)


def save_critic(module: ActorCritic, directory: Path, distributed: Distributed) -> bool:
    """Write decoder and value head as a token classifier with one label; a collective.

    `AutoModelForTokenClassification.from_pretrained(path)(ids).logits[0, t, 0]` is then V after `ids[:t + 1]` (in eval
    mode: those classes have dropout), and `model.critic_path` can load it. A shared trunk is written whole, with
    adapters merged. Returns False, and writes nothing, for architectures without a token classifier.
    """
    from lockstep.rollout.weights.source import ZeroSource  # here: it imports vLLM, which takes seconds

    if isinstance(module.critic, Critic):
        decoder, source, prefix, head = module.critic.decoder, module.critic.decoder, "", module.critic.head
    else:
        causal_lm = module.policy.causal_lm
        decoder, source, head = causal_lm.get_decoder(), module.policy.model, module.critic
        prefix = f"{causal_lm.base_model_prefix}."
    config = deepcopy(decoder.config)
    config.num_labels = 1
    if type(config) not in AutoModelForTokenClassification._model_mapping:
        return False
    trunk = {
        name.removeprefix(prefix): tensor.cpu()
        for name, tensor in ZeroSource(source, readers=[0])
        if name.startswith(prefix)
    }
    with distributed.whole_parameters(head):
        if distributed.is_main:
            with distributed.whole_models(), torch.device("meta"):
                classifier = AutoModelForTokenClassification.from_config(config)
            state = {f"{classifier.base_model_prefix}.{name}": tensor for name, tensor in trunk.items()}
            own = head.linear.state_dict()
            state |= {f"{head_name(classifier)}.{name}": tensor.cpu() for name, tensor in own.items()}
            classifier.save_pretrained(directory, state_dict=state)
    return True
