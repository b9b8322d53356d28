"""The policy: a causal language model that scores packed rows.

    packed rows ─► decoder (rows cannot see each other) ─► hidden states at target positions ─► fused head
                                                                             ─► log-probability, entropy

Hand the whole `Policy` to `accelerator.prepare`: DDP and DeepSpeed act on the forward of the module they wrap.

Covered: decoder-only models of transformers with one linear head: tied or not, with bias, scaled or softcapped logits,
sliding windows, LoRA on everything but the head. Refused with a sentence: encoder-decoders, quantised or adapted heads,
attention that packed rows cannot be kept apart in.

Shape legend: _L tokens of the pack, _T trained tokens of the pack, _D hidden size.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rollout.errors import ConfigError
from trainer.batch.packing import PackedBatch
from trainer.config.schema import LoraConfig
from trainer.model import decoder
from trainer.model.fused_head import FusedHead, LogitTransform
from trainer.model.lora import add_adapters, is_adapted

if TYPE_CHECKING:
    from peft import PeftModel


class Policy(nn.Module):
    """log π(token) and entropy of packed rows, with the semantics of eval mode also in train mode (no dropout)."""

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        *,
        attn_implementation: str = decoder.AUTO,
        gradient_checkpointing: bool = False,
        is_compiled: bool = False,
        compute_dtype: torch.dtype | str | None = None,
    ) -> None:
        """Wrap a loaded model, which goes on working by itself (`policy.model`): saving, generation, plain logits.

        Args:
            model: with adapters or without.
            attn_implementation: one of `trainer.config.schema.ATTENTIONS`.
            gradient_checkpointing: keep only the inputs of layers between forward and backward.
            is_compiled: compile the layers (`decoder.compile_layers`).
            compute_dtype: what mixed precision will compute in, which decides about FlashAttention; None: the dtype
                of the weights.

        Raises:
            ConfigError: the model's rows cannot be kept apart in a pack, or its head cannot be fused.
        """
        super().__init__()
        self.model = model
        causal_lm = self.causal_lm
        decoder.refuse_unpackable(causal_lm)
        causal_lm.set_output_embeddings(fused_head(causal_lm))
        decoder.prepare(
            causal_lm,
            attn_implementation=attn_implementation,
            gradient_checkpointing=gradient_checkpointing,
            compute_dtype=compute_dtype,
        )
        self.logit_scale, self.softcap = logit_settings(causal_lm.config.get_text_config())
        self._compare_head_with_model()
        if is_compiled:
            decoder.compile_layers(causal_lm)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype | str = torch.float32,
        attn_implementation: str = decoder.AUTO,
        gradient_checkpointing: bool = False,
        is_compiled: bool = False,
        trust_remote_code: bool = False,
        compute_dtype: torch.dtype | str | None = None,
        lora: LoraConfig | None = None,
    ) -> Policy:
        """Load weights from a directory or a hub name, and add the adapters that `lora` asks for.

        Raises:
            ConfigError: nothing loadable is there, or the model cannot be a policy; found before weights are read
                where the config already says so.
        """
        decoder.packable_config(
            path,
            setting="model.path",
            expected="a directory with config.json and weights, or the name of a model on the hub",
            trust_remote_code=trust_remote_code,
        )
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=trust_remote_code)
        return cls(
            model if lora is None or not lora.rank else add_adapters(model, lora),
            attn_implementation=attn_implementation,
            gradient_checkpointing=gradient_checkpointing,
            is_compiled=is_compiled,
            compute_dtype=compute_dtype,
        )

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The transformers model itself, with adapters inside if there are any."""
        inner = self.model.get_base_model() if is_adapted(self.model) else self.model
        assert isinstance(inner, PreTrainedModel)
        return inner

    def forward(
        self, packed: PackedBatch, *, temperature: float = 1.0, with_entropy: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Score the trained tokens of a pack.

        Args:
            packed: on the model's device.
            temperature: of the distribution that was sampled from; logits are divided by it.
            with_entropy: else the entropy is zeros.

        Returns:
            logp_T and entropy_T in nats, float32 or wider, normalised over `packed.support_ids` if there are any. A
            pack without trained tokens gives empty tensors that still reach every parameter in backward.
        """
        return self.score(self.hidden_states(packed), packed, temperature=temperature, with_entropy=with_entropy)

    def hidden_states(self, packed: PackedBatch) -> torch.Tensor:
        """(L, D): last hidden states of the pack, each row as if it were alone."""
        return decoder.packed_hidden_states(self.causal_lm.get_decoder(), packed)

    def score(
        self, hidden_LD: torch.Tensor, packed: PackedBatch, *, temperature: float = 1.0, with_entropy: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `forward` returns, from hidden states that something else reads too (a value head)."""
        support = None
        if packed.support_offsets is not None and packed.support_ids is not None:
            support = (packed.support_offsets, packed.support_ids)
        head = self.causal_lm.get_output_embeddings()
        assert isinstance(head, FusedHead)
        return head(
            hidden_LD.index_select(0, packed.target_index_T),
            packed.target_ids_T,
            transform=LogitTransform(temperature=temperature, scale=self.logit_scale, softcap=self.softcap),
            support=support,
            with_entropy=with_entropy,
        )

    @torch.no_grad()
    def _compare_head_with_model(self) -> None:
        """Refuse models whose own forward does something to logits or hidden states that the fused head does not.

        Skipped where the model cannot run yet: weights partitioned by ZeRO-3 or on the meta device, FlashAttention
        before the model is on its GPU.
        """
        weights = next(self.parameters())
        runs_here = weights.is_cuda or not decoder.attention_of(self.causal_lm).startswith("flash_attention")
        if weights.numel() == 0 or weights.is_meta or not runs_here:
            return
        ids = torch.arange(4, device=weights.device)
        was_training = self.training
        self.eval()
        expected = torch.log_softmax(self.causal_lm(ids[None], use_cache=False).logits[0, :-1].double(), -1)
        found, _ = self(_probe(ids), with_entropy=False)
        self.train(was_training)
        expected = expected.gather(1, ids[1:, None])[:, 0]
        tolerance = 1e-3 if torch.finfo(weights.dtype).bits >= 32 else 0.1
        if not torch.allclose(found.double(), expected, rtol=tolerance, atol=tolerance):
            raise ConfigError(
                f"{type(self.causal_lm).__name__}: log-probabilities from the fused head differ from the model's own "
                f"forward ({found.tolist()} and {expected.tolist()}). It changes logits in a way this version does not "
                "know; known are scale (logit_scale, logits_scaling), softcap (final_logit_softcapping) and bias"
            )


def fused_head(model: PreTrainedModel) -> FusedHead:
    """The model's head as a `FusedHead` over the same parameters.

    Raises:
        ConfigError: the head is not one plain linear layer.
    """
    head = model.get_output_embeddings()
    if isinstance(head, FusedHead):
        return head
    if type(head) is not nn.Linear:
        raise ConfigError(
            f"the head of {type(model).__name__} is a {type(head).__name__}; expected a plain torch.nn.Linear. If it "
            "is adapted or quantised, leave lm_head out: "
            "LoraConfig(target_modules=...) and modules_to_save without "
            "lm_head, or llm_int8_skip_modules=['lm_head'] when quantising"
        )
    return FusedHead(head)


def logit_settings(config: PreTrainedConfig) -> tuple[float, float | None]:
    """Scale and softcap that the model applies to the product of its head."""
    settings = config.to_dict()
    scale = settings.get("logit_scale") or 1.0 / (settings.get("logits_scaling") or 1.0)
    return float(scale), settings.get("final_logit_softcapping")


def _probe(ids: torch.Tensor) -> PackedBatch:
    """One row whose tokens are all trained but the first."""
    index = torch.arange(len(ids) - 1, device=ids.device)
    return PackedBatch(
        ids=ids,
        position_ids=torch.arange(len(ids), device=ids.device),
        cu_seqlens=torch.tensor([0, len(ids)], dtype=torch.int32, device=ids.device),
        row_lengths=(len(ids),),
        target_index_T=index,
        target_ids_T=ids[1:],
        sampling_logprobs_T=torch.zeros(len(index), device=ids.device),
        versions_T=index,
        turns_T=index,
        rollout_T=index,
        token_index_T=index,
    )
