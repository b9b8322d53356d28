"""GLM-4.7-Flash with the norms of its latent attention as transformers has them: their ε is 1e-6, not `rms_norm_eps`.

Registered with vLLM in place of its own class, whose module is imported only where it is used.
"""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.model_executor.models import glm4_moe_lite

EPSILON = 1e-6
LATENT_NORMS = (".q_a_layernorm", ".kv_a_layernorm")


class Glm4MoeLiteForCausalLM(glm4_moe_lite.Glm4MoeLiteForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for name, module in self.named_modules():
            if name.endswith(LATENT_NORMS):
                vars(module)["variance_epsilon"] = EPSILON
