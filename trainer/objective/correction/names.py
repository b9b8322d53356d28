"""Names of the metrics of rollout correction, for readers that do not load torch."""

PREFIX = "rollout_correction/"
QUANTIZATION_K3 = PREFIX + "quantization_k3"
