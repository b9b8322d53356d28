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

import inspect
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.import_utils import is_flash_attn_2_available

from rollout.errors import ConfigError
from trainer import attention
from trainer.config import LoraConfig
from trainer.head import FusedHead, LogitTransform
from trainer.lora import add_adapters
from trainer.packing import PackedBatch

AUTO = "auto"
ATTENTION_CHOICES = (AUTO, attention.PACKED_ROWS, "flash_attention_2", "flash_attention_3", "sdpa", "eager")
"""`auto`: FlashAttention-2 where it is installed and the weights are half precision on a GPU, else `packed_rows`.
`sdpa` and `eager` build an L × L mask per pack: exact, slow, for comparison."""

PACKABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Layer types whose only view of other tokens is attention that respects rows. Recurrent layers carry state over."""

_RANDOM = ("dropout", "drop_rate", "pdrop", "layerdrop", "jitter")
"""Parts of the names of config fields and module attributes that make a forward random."""


class Policy(nn.Module):
    """log π(token) and entropy of packed rows, with the semantics of eval mode also in train mode (no dropout)."""

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        *,
        attn_implementation: str = AUTO,
        gradient_checkpointing: bool = False,
        compute_dtype: torch.dtype | str | None = None,
    ) -> None:
        """Wrap a loaded model, which goes on working by itself (`policy.model`): saving, generation, plain logits.

        Args:
            model: with adapters or without.
            attn_implementation: one of `ATTENTION_CHOICES`.
            gradient_checkpointing: keep only the inputs of layers between forward and backward.
            compute_dtype: what mixed precision will compute in, which decides about FlashAttention; None: the dtype
                of the weights.

        Raises:
            ConfigError: the model's rows cannot be kept apart in a pack, or its head cannot be fused.
        """
        super().__init__()
        self.model = model
        causal_lm = self.causal_lm
        refuse_unpackable(causal_lm)
        head = fused_head(causal_lm)
        causal_lm.set_output_embeddings(head)
        attention.register()
        causal_lm.set_attn_implementation(choose_attention(attn_implementation, causal_lm, compute_dtype))
        disable_randomness(causal_lm)
        self.logit_scale, self.softcap = logit_settings(causal_lm.config.get_text_config())
        if gradient_checkpointing:
            causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
        self._compare_head_with_model()

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype | str = torch.float32,
        attn_implementation: str = AUTO,
        gradient_checkpointing: bool = False,
        trust_remote_code: bool = False,
        compute_dtype: torch.dtype | str | None = None,
        lora: LoraConfig | None = None,
    ) -> Policy:
        """Load weights from a directory or a hub name, and add the adapters that `lora` asks for.

        Raises:
            ConfigError: nothing loadable is there, or the model cannot be a policy; found before weights are read
                where the config already says so.
        """
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model.path={path}: no loadable model config ({error}). Expected a directory with config.json and "
                "weights, or the name of a model on the hub"
            ) from error
        refuse_architecture(config)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=trust_remote_code)
        return cls(
            model if lora is None or not lora.rank else add_adapters(model, lora),
            attn_implementation=attn_implementation,
            gradient_checkpointing=gradient_checkpointing,
            compute_dtype=compute_dtype,
        )

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The transformers model itself, with adapters inside if there are any."""
        inner = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        assert isinstance(inner, PreTrainedModel)
        return inner

    @property
    def attn_implementation(self) -> str:
        return str(self.causal_lm.config.get_text_config()._attn_implementation)

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
        return packed_hidden_states(self.causal_lm.get_decoder(), packed, self.attn_implementation)

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
        runs_here = weights.is_cuda or not self.attn_implementation.startswith("flash_attention")
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


def packed_hidden_states(decoder: nn.Module, packed: PackedBatch, attn_implementation: str) -> torch.Tensor:
    """(L, D): last hidden states of a decoder over a pack, each row as if it were alone.

    attn_implementation: what the decoder was set to, one of `ATTENTION_CHOICES` but `auto`.
    """
    arguments: dict[str, Any] = {}
    if attn_implementation == attention.PACKED_ROWS:
        arguments = {"attention_mask": attention.no_mask(packed.ids.device), "row_lengths": packed.row_lengths}
    elif attn_implementation.startswith("flash_attention"):
        longest = max(packed.row_lengths)
        arguments = {
            "cu_seq_lens_q": packed.cu_seqlens,
            "cu_seq_lens_k": packed.cu_seqlens,
            "max_length_q": longest,
            "max_length_k": longest,
        }
    # sdpa, eager: without a mask and a cache, transformers makes a block-causal mask where position ids restart.
    output = decoder(input_ids=packed.ids[None], position_ids=packed.position_ids[None], use_cache=False, **arguments)
    return output.last_hidden_state[0]


def refuse_architecture(config: PreTrainedConfig) -> None:
    """Raise ConfigError for what the config alone shows to be no packable decoder."""
    text = config.get_text_config()
    if config.is_encoder_decoder:
        raise ConfigError(
            f"model type {config.model_type} is an encoder-decoder; expected a decoder-only causal language model "
            "(for example Qwen3, Llama, Gemma, Mistral): set model.path to one"
        )
    unpackable = sorted(set(text.to_dict().get("layer_types") or ()) - PACKABLE_LAYERS)
    if unpackable:
        raise ConfigError(
            f"model type {config.model_type} has layers of type {', '.join(unpackable)}, in which rows of a pack would "
            f"see each other; expected only {' and '.join(sorted(PACKABLE_LAYERS))}: set model.path to such a model"
        )


def refuse_unpackable(model: PreTrainedModel) -> None:
    """Raise ConfigError unless rows of a pack can be kept apart in this model."""
    refuse_architecture(model.config)
    name = type(model).__name__
    if not model._supports_attention_backend:
        raise ConfigError(
            f"{name} does not route its attention through transformers' attention interface, so rows of a pack cannot "
            "be kept apart; set model.path to a model that does (most decoders in transformers 5)"
        )
    if "position_ids" not in inspect.signature(model.get_decoder().forward).parameters:
        raise ConfigError(f"{name} takes no position ids, which must restart in each row of a pack")


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


def choose_attention(requested: str, model: PreTrainedModel, compute_dtype: torch.dtype | str | None = None) -> str:
    """The attention implementation to use for `requested`; compute_dtype: of mixed precision, else the weights'.

    Raises:
        ConfigError: an unknown name, or FlashAttention for weights it cannot compute with.
    """
    if requested not in ATTENTION_CHOICES:
        raise ConfigError(f"attn_implementation={requested}: expected one of {', '.join(ATTENTION_CHOICES)}")
    if isinstance(compute_dtype, str):
        compute_dtype = getattr(torch, compute_dtype)
    dtype = compute_dtype or model.dtype
    half = dtype in (torch.bfloat16, torch.float16)
    if requested == AUTO:
        flash = half and torch.cuda.is_available() and is_flash_attn_2_available() and model._supports_flash_attn
        return "flash_attention_2" if flash else attention.PACKED_ROWS
    if requested.startswith("flash_attention") and not half:
        raise ConfigError(
            f"attn_implementation={requested} needs bfloat16 or float16, found {dtype}: "
            f"set model.dtype=bfloat16 or model.attn_implementation={attention.PACKED_ROWS}"
        )
    return requested


def disable_randomness(model: nn.Module) -> None:
    """Set every dropout and jitter to 0, in modules and configs.

    Train mode is needed for gradient checkpointing, but log-probabilities must be those of the sampler, which has no
    dropout (ppo.md P4). Attention layers copy the probability into plain attributes, so `nn.Dropout` is not enough.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for holder in (module, *(value for value in vars(module).values() if isinstance(value, PreTrainedConfig))):
            for name, value in list(vars(holder).items()):
                if isinstance(value, float) and any(part in name for part in _RANDOM):
                    setattr(holder, name, 0.0)


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
