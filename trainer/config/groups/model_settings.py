"""Settings of the trained model: `model`."""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.trainer.config.conditions import CRITIC, IMAGES, LORA, REFERENCE, SERVED_ADAPTERS
from lockstep.trainer.setting import NOT_MEASURED, setting

ATTENTIONS = ("auto", "packed_rows", "flash_attention_2", "flash_attention_3", "sdpa", "eager")


@dataclass
class LoraConfig:
    rank: int = setting(0, "rank of low-rank adapters, trained in place of the weights; 0: no adapters", low=0)
    alpha: float = setting(32.0, "adapters are scaled by alpha / rank", when=LORA)
    target_modules: list[str] | None = setting(None, "linear layers with adapters; null: all but the head", when=LORA)
    rslora: bool = setting(False, "scale adapters by alpha / sqrt(rank), rsLoRA (arXiv:2312.03732)", when=LORA)
    path: str | None = setting(
        None,
        "adapter to start from, as peft saves it, with the rank, alpha and layers set here",
        is_path=True,
        when=LORA,
    )
    send: str = setting(
        "auto",
        "what engines get; adapter: A and B, applied to weights that stay; merged: whole weights; auto: adapter, if "
        "vLLM applies it to every layer of the model's family",
        choices=("auto", "adapter", "merged"),
        when=LORA,
    )


@dataclass
class ImagesConfig:
    max_per_prompt: int = setting(
        0,
        "most images of a conversation, those of tools included; the vision tower is loaded in trainer and engine, and "
        "data and tools may bring images (docs/images.md); 0: text alone",
        low=0,
    )
    train_tower: bool = setting(False, "train the vision tower and its projector, too; false: frozen", when=IMAGES)


@dataclass
class ModelConfig:
    path: str = setting(
        "",
        "directory or hub id of the policy, for `from_pretrained`",
        is_path=True,
        example="model.path=Qwen/Qwen2.5-0.5B-Instruct",
    )
    dtype: str = setting(
        "float32",
        "dtype of computation and engine; bfloat16: master weights, gradients and optimizer stay float32",
        choices=("float32", "bfloat16"),
    )
    attn_implementation: str = setting(
        "auto",
        "attention in the trainer; auto: packed_rows, one FlashAttention kernel per layer in half precision on "
        "NVIDIA GPUs, SDPA row by row elsewhere",
        choices=ATTENTIONS,
    )
    critic: str = setting(
        "separate",
        "separate: a critic with its own decoder; shared: a value head on the policy's trunk",
        choices=("separate", "shared"),
        when=CRITIC,
    )
    critic_path: str | None = setting(
        None,
        "initial separate critic: a model, a reward model, or a run's critic/; null: model.path",
        is_path=True,
        when=CRITIC,
    )
    reference_path: str | None = setting(
        None, "frozen reference for the KL term; null: model.path", is_path=True, when=REFERENCE
    )
    chat_template: str | None = setting(
        None,
        "chat template in place of the model's: hermes (ChatML with tools), or a Jinja file; null: the model's",
        is_path=True,
    )
    gradient_checkpointing: bool | None = setting(
        None,
        "recompute activations in the backward pass to save memory, for a third more time of an update; null: where "
        "the memory plan needs it",
    )
    compile: bool | None = setting(
        None,
        "torch.compile the layers of the trained models; null: on GPUs",
        experimental=NOT_MEASURED,
    )
    trust_remote_code: bool = setting(False, "run code that ships with the model, in trainer and engine")
    lora: LoraConfig = field(default_factory=LoraConfig)
    images: ImagesConfig = field(default_factory=ImagesConfig)
    adapters: dict[str, str] = setting(
        {},
        "lockstep evaluate, serve and serve-engine: adapters by name, directories that peft wrote, beside the "
        "model in one engine",
        is_path=True,
        when=SERVED_ADAPTERS,
    )

    @property
    def attention(self) -> str:
        """attn_implementation with auto resolved."""
        return "packed_rows" if self.attn_implementation == "auto" else self.attn_implementation

    @property
    def is_checkpointed(self) -> bool:
        """gradient_checkpointing with null resolved, as long as no memory plan has chosen it."""
        return bool(self.gradient_checkpointing)

    @property
    def is_compiled(self) -> bool:
        """compile with null resolved, as long as a run has not chosen it."""
        return bool(self.compile)

    @property
    def sees_images(self) -> bool:
        """True if prompts may have images."""
        return self.images.max_per_prompt > 0
