"""Settings of generation beside a model's weights, which `save_pretrained` refuses where they contradict each other."""

from __future__ import annotations

from transformers import GenerationConfig, PreTrainedModel


def mend_generation(model: PreTrainedModel) -> list[str]:
    """Make the generation config one that can be saved. Returns a sentence if it was changed.

    Published ones have `do_sample: false` beside a temperature, which only a sampler reads.
    """
    if not model.can_generate():
        return []
    settings = model.generation_config
    try:
        settings.validate(strict=True)
        return []
    except ValueError as error:
        _, _, reason = str(error).partition("\n")
    settings.do_sample = True
    fields = "all its values and do_sample=true"
    try:
        settings.validate(strict=True)
    except ValueError:
        fields = "its beginning and end ids alone"
        model.generation_config = GenerationConfig(
            bos_token_id=settings.bos_token_id, eos_token_id=settings.eos_token_id
        )
    reason = " ".join(reason.split())[:200]
    return [f"transformers refuses to save its generation config ({reason}); the trained model is saved with {fields}"]
