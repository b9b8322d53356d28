"""The critic as a directory that transformers loads, and `model.critic_path` goes on from.

It is written as a classifier of tokens with one label: the logit at a token is the value of the state behind it. So
`AutoModelForTokenClassification.from_pretrained(path)(ids).logits[0, t, 0]` is V after `ids[:t + 1]`, in any program
that has transformers (in eval mode: those classes have dropout).
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import torch
from transformers import AutoModelForTokenClassification

from trainer.distributed.distributed import Distributed
from trainer.model.critic import ActorCritic, Critic, head_name


def save_critic(module: ActorCritic, directory: Path, distributed: Distributed) -> bool:
    """Write decoder and value head; a collective. A shared trunk is written whole, with adapters merged.

    Returns whether there is something to load: False for architectures without a classifier of tokens.
    """
    from rollout.weights.source import ZeroSource  # it imports vLLM, which takes seconds

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
    trunk = {}
    for name, tensor in ZeroSource(source, readers=[0]):
        if name.startswith(prefix):
            trunk[name.removeprefix(prefix)] = tensor.cpu()
    with distributed.whole_parameters(head):
        if distributed.is_main:
            with distributed.whole_models(), torch.device("meta"):
                classifier = AutoModelForTokenClassification.from_config(config)
            state = {f"{classifier.base_model_prefix}.{name}": tensor for name, tensor in trunk.items()}
            own = head.linear.state_dict()
            state |= {f"{head_name(classifier)}.{name}": tensor.cpu() for name, tensor in own.items()}
            classifier.save_pretrained(directory, state_dict=state)
    return True
