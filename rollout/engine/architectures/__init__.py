"""Models that vLLM takes from here in place of its own; imported by vLLM where a checkpoint needs one."""

from lockstep.rollout.vllm_names import check_vllm

check_vllm("architectures")
