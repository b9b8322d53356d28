"""The policy: a causal language model that scores packed rows.

    packed rows ─► decoder (rows cannot see each other) ─► hidden states at target positions ─► fused head
                                                                             ─► log-probability, entropy

Pass the whole `Policy` to `accelerator.prepare`: DDP and DeepSpeed act on the forward of the module they wrap.

Covered: decoder-only models of transformers with one linear head: tied or untied, with bias, scaled or softcapped
logits, sliding windows, LoRA on everything but the head. Refused with a message: encoder-decoders, quantized or adapted
heads, attention that cannot keep packed rows apart.

Shape legend: _L tokens of the pack, _T trained tokens of the pack, _D hidden size.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, Unpack

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from lockstep.rollout.errors import ConfigError
from lockstep.rollout.models.loading import load_model
from lockstep.rollout.models.stored_model import language_model
from lockstep.trainer.batch.packing import PackedBatch, collate, whole_row
from lockstep.trainer.config.groups.model_settings import LoraConfig
from lockstep.trainer.model import decoder
from lockstep.trainer.model.head.fused_head import FusedHead
from lockstep.trainer.model.head.logit_tiles import LogitTransform
from lockstep.trainer.model.layers.routing import Routing
from lockstep.trainer.model.quantized_base import loading_arguments, stored_method

if TYPE_CHECKING:
    from peft import PeftModel

PROBE = whole_row(range(4))
"""Row on which the fused head is compared with the model's own forward."""


def is_adapted(model: nn.Module) -> TypeGuard[PeftModel]:
    """True if the model has adapters. Does not import peft, which takes seconds."""
    if "peft" not in sys.modules:
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def policy_of(module: nn.Module) -> Policy:
    """Return the policy inside the trained module, with or without a critic."""
    policy = module if isinstance(module, Policy) else module.policy
    assert isinstance(policy, Policy)
    return policy


class Policy(nn.Module):
    """log π(token) and entropy of packed rows. No dropout, so train mode computes what eval mode does."""

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        *,
        is_compiled: bool = False,
        **setup: Unpack[decoder.DecoderSetup],
    ) -> None:
        """Wrap a loaded model, with or without adapters. `policy.model` stays usable by itself: saving, generation.

        Raises:
            ConfigError: rows cannot be kept apart in a pack of this model, its head cannot be fused, or it cannot see
                images.
        """
        super().__init__()
        self.model = model
        self.is_quantized = False
        """True if the checkpoint of the frozen weights is quantized, so that they cannot be merged with adapters."""
        causal_lm = self.causal_lm
        decoder.prepare(causal_lm, **setup)
        if setup.get("trains_tower") and is_adapted(model):
            raise ConfigError("with adapters the vision tower stays frozen; train it without them (model.lora.rank=0)")
        self.vision = decoder.vision_of(causal_lm, **setup)
        causal_lm.set_output_embeddings(fused_head(causal_lm))
        self.routing = Routing(causal_lm)
        self.logit_scale, self.softcap = logit_settings(causal_lm.config.get_text_config())
        self._compare_head_with_model()
        if is_compiled:
            from lockstep.trainer.model.layers.compiled import compile_layers  # other runs do not load it

            compile_layers(causal_lm.get_decoder() if self.vision else causal_lm)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype | str = torch.float32,
        is_compiled: bool = False,
        trust_remote_code: bool = False,
        setting: str = "model.path",
        lora: LoraConfig | None = None,
        **setup: Unpack[decoder.DecoderSetup],
    ) -> Policy:
        """Load weights from a directory or a hub name, and add the adapters that `lora` asks for.

        setting: name of the path's setting. Other arguments are those of `Policy`. Raises `ConfigError` without a
        loadable model that can be a policy, before weights are read if possible.
        """
        has_adapters = lora is not None and lora.rank > 0
        sees_images = setup.get("sees_images", False)
        config = decoder.packable_config(
            path,
            setting=setting,
            trust_remote_code=trust_remote_code,
            has_adapters=has_adapters,
            sees_images=sees_images,
        )
        model = load_model(
            language_model(sees_images=sees_images),
            path,
            setting=setting,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            config=config,
            dequantizing=loading_arguments(config),
        )
        if lora and has_adapters:
            from lockstep.trainer.model.lora import add_adapters  # models without adapters do not load it

            model = add_adapters(model, lora)
        policy = cls(
            model,
            is_compiled=is_compiled,
            **setup,
        )
        policy.is_quantized = stored_method(config) is not None
        return policy

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding."""
        return self.causal_lm.config.get_text_config().vocab_size

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The transformers model itself, with any adapters inside."""
        inner = self.model.get_base_model() if is_adapted(self.model) else self.model
        assert isinstance(inner, PreTrainedModel)
        return inner

    def forward(
        self,
        packed: PackedBatch,
        *,
        temperature: float = 1.0,
        with_entropy: bool = True,
        with_routes: bool = False,
        candidate_ids_TE: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return logp_T and entropy_T of the trained tokens of a pack, in nats, float32 or wider.

        They are normalized over `packed.support_ids` if given. A pack without trained tokens gives empty tensors whose
        backward still reaches every parameter.

        temperature: sampling temperature, which divides the logits ("The N Implementation Details of RLHF with PPO",
        Hugging Face blog, 2023: "Scale the logits by sampling temperature"). with_entropy: False returns zeros for it.
        with_routes: also return the (L, layers, k) experts of all tokens, of a mixture of experts.
        candidate_ids_TE: also return the (T, E + 1) logprobs of these ids and of all others, before the experts; not
        with a support.
        """
        hidden_LD, *routes = self.traced_states(packed) if with_routes else (self.hidden_states(packed),)
        outputs = self.score(
            hidden_LD,
            packed,
            temperature=temperature,
            with_entropy=with_entropy,
            candidate_ids_TE=candidate_ids_TE,
        )
        return (*outputs, *routes)

    def hidden_states(self, packed: PackedBatch) -> torch.Tensor:
        """Return the (L, D) last hidden states of the pack, each row computed as if it were alone."""
        inputs = None if self.vision is None else self.vision.inputs(packed)
        hidden_LD = decoder.packed_hidden_states(self.causal_lm.get_decoder(), packed, inputs)
        self.routing.check_given(packed)
        return hidden_LD

    def traced_states(self, packed: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden states, and the (L, layers, k) experts that computed them."""
        with self.routing.recording() as last_experts:
            return self.hidden_states(packed), last_experts()

    def score(
        self,
        hidden_LD: torch.Tensor,
        packed: PackedBatch,
        *,
        temperature: float = 1.0,
        with_entropy: bool = True,
        candidate_ids_TE: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return what `forward` does, from hidden states that a value head may share."""
        support: dict[str, Any] = {}
        if packed.support_offsets is not None and packed.support_ids is not None:
            support = {"support": (packed.support_offsets, packed.support_ids)}
        head = self.causal_lm.get_output_embeddings()
        assert isinstance(head, FusedHead)
        return head(
            hidden_LD.index_select(0, packed.target_index_T),
            packed.target_ids_T,
            transform=LogitTransform(temperature=temperature, scale=self.logit_scale, softcap=self.softcap),
            candidate_ids_NE=candidate_ids_TE,
            with_entropy=with_entropy,
            **support,
        )

    @torch.no_grad()
    def _compare_head_with_model(self) -> None:
        """Refuse models whose own forward changes logits or hidden states in a way that the fused head does not.

        Skipped if the model cannot run yet: weights partitioned by ZeRO-3 or on the meta device, FlashAttention before
        the model is on its GPU.
        """
        weights = next(self.parameters())
        runs_here = weights.is_cuda or not decoder.attention_of(self.causal_lm).startswith("flash_attention")
        if weights.numel() == 0 or weights.is_meta or not runs_here:
            return
        packed = collate([PROBE], [0], device=weights.device)
        was_training = self.training
        self.eval()
        expected = torch.log_softmax(self.causal_lm(packed.ids[None], use_cache=False).logits[0, :-1].double(), -1)
        logprobs, _ = self(packed, with_entropy=False)
        self.train(was_training)
        expected = expected.gather(1, packed.target_ids_T[:, None])[:, 0]
        tolerance = 1e-3 if torch.finfo(weights.dtype).bits >= 32 else 0.1
        if not torch.allclose(logprobs.double(), expected, rtol=tolerance, atol=tolerance):
            raise ConfigError(
                f"{type(self.causal_lm).__name__}: log-probabilities from the fused head differ from the model's own "
                f"forward ({logprobs.tolist()} and {expected.tolist()}). It changes logits in a way that is not "
                "supported; known are scale (logit_scale, logits_scaling, lm_head_multiplier), softcap "
                "(final_logit_softcapping) and bias"
            )


def fused_head(model: PreTrainedModel) -> FusedHead:
    """Return the model's head as a `FusedHead` with its parameters. Raises `ConfigError` unless it is a plain linear
    layer."""
    head = model.get_output_embeddings()
    if isinstance(head, FusedHead):
        return head
    if type(head) is not nn.Linear:
        raise ConfigError(
            f"the head of {type(model).__name__} is a {type(head).__name__}; expected a plain torch.nn.Linear. If it "
            "is adapted or quantized, leave lm_head out: LoraConfig(target_modules=...) and modules_to_save without "
            "lm_head, or llm_int8_skip_modules=['lm_head'] when quantizing"
        )
    return FusedHead(head)


def logit_settings(config: PreTrainedConfig) -> tuple[float, float | None]:
    """Return the scale and the softcap that the model applies to the output of its head."""
    settings = config.to_dict()
    factors = (settings.get(name) or 1.0 for name in ("logit_scale", "lm_head_multiplier"))
    return math.prod(factors) / (settings.get("logits_scaling") or 1.0), settings.get("final_logit_softcapping")
