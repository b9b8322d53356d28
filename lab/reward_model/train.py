"""Training of a reward model, from comparisons to a saved model. All ranks of the script call `train`.

    samples of the pretrained model ─► normalize ─► one epoch over comparisons ─► reset, normalize again ─► save

All ranks share one permutation of the data. The loss is the mean over the comparisons of an optimizer step on all
ranks, however they are split into microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf

from lockstep.lab.reward_model.config import RewardModelConfig
from lockstep.lab.reward_model.data import Comparison, Lengths, read_comparisons, read_tokenizer
from lockstep.lab.reward_model.losses import best_of_n_loss
from lockstep.lab.reward_model.model import Normalization, fit, make_model, save
from lockstep.lab.reward_model.sampling import normalization_samples
from lockstep.rewards.model.padding import pad
from lockstep.rollout.errors import ConfigError, TrainingError
from lockstep.trainer.config.redaction import redact
from lockstep.trainer.data.datasets import load_rows
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.objective.whitening import moments
from lockstep.trainer.observe.metrics_log import MetricsLog
from lockstep.trainer.update.optimizers.optimizer import make_optimizer
from lockstep.trainer.update.schedule import learning_rate


def train(config: RewardModelConfig) -> None:
    """Train as configured. Raises `LockstepError` on every rank if training cannot continue."""
    samples = normalization_samples(config)
    distributed = Distributed.start(
        dtype=config.model.dtype,
        max_grad_norm=config.optimizer.max_grad_norm,
        reduce_dtype=config.optimizer.reduce_dtype,
    )
    with distributed:
        RewardModelTraining(config, distributed, samples).run()


class RewardModelTraining:
    """One rank of the training."""

    def __init__(self, config: RewardModelConfig, distributed: Distributed, samples: Sequence[Sequence[int]]) -> None:
        """samples: ids of query and response, this rank's share of the normalization samples."""
        self._config = config
        self._distributed = distributed
        self._samples = samples
        torch.manual_seed(config.seed)
        trust = config.model.trust_remote_code
        self._tokenizer, context = read_tokenizer(config.model.path, setting="model.path", trust_remote_code=trust)
        self._comparisons = self._load(config.data.path, config.data.split, shuffled=True)
        self._heldout = (
            self._load(config.data.heldout_path, config.data.heldout_split, shuffled=False)
            if config.data.heldout_path
            else []
        )
        every_one = (sequence for one in (*self._comparisons, *self._heldout) for sequence in one.sequences)
        longest = max(map(len, every_one))
        if context is not None and longest > context:
            raise ConfigError(
                f"data.max_tokens={config.data.max_tokens}: the longest response with its query is {longest} tokens, "
                f"and model.path={config.model.path} has positions for {context}; set data.max_tokens={context}"
            )
        model = make_model(config, distributed, pad_token_id=self._tokenizer.pad_token_id)  # type: ignore[arg-type]  # stubs
        self._module = distributed.prepare(model, make_optimizer(model, config.optimizer))
        self._normalization = Normalization()
        self.num_updates = 0

    def run(self) -> None:
        """Run the whole training and save the model in `<run directory>/model`."""
        directory = self._make_directory()
        metrics = self._open_log(directory)
        total = self._config.epochs * len(list(self._batches(0)))
        self._say(f"run directory  {directory}\n{len(self._comparisons)} comparisons, {total} updates")
        try:
            self._normalize()
            for epoch in range(self._config.epochs):
                for batch in self._batches(epoch):
                    numbers = self._update(batch, total)
                    if self._config.eval_every and self.num_updates % self._config.eval_every == 0:
                        numbers |= self._evaluate()
                    self._report(metrics, numbers)
            self._normalize()
            final = self._evaluate() | self._sample_statistics()
            self._report(metrics, final)
            save(directory / "model", self._normalization, self._tokenizer, self._distributed)
            self._say(f"model          {directory / 'model'}")
        finally:
            if metrics is not None:
                metrics.close()

    # One optimizer step

    def _update(self, batch: Sequence[Comparison], total_updates: int) -> dict[str, float]:
        """Make one optimizer step on these comparisons of all ranks."""
        lr = learning_rate(self.num_updates, self._config.optimizer, total_updates=total_updates)
        sums = []
        microbatches = self._microbatches(batch)
        for number, own in enumerate(microbatches):
            with self._distributed.accumulate(is_last=number == len(microbatches) - 1) as backward:
                loss_B, metrics = self._losses(own)
                # Ranks average gradients, but the loss is a sum over ranks.
                backward(loss_B.sum() * (self._distributed.world_size / len(batch)))
            sums.append(metrics)
        grad_norm = self._distributed.gradient_norm()
        if not math.isfinite(grad_norm):
            raise TrainingError(
                f"update {self.num_updates + 1}: the gradient norm is {grad_norm}; this step was not made; start "
                "again with a lower optimizer.lr"
            )
        self._distributed.step(lr, grad_norm)
        self.num_updates += 1
        return self._means(sums, len(batch), "reward_model/") | {"optim/lr": lr, "optim/grad_norm": grad_norm}

    def _losses(self, comparisons: Sequence[Comparison]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return losses and sums for metrics; without comparisons, a zero that still reaches every parameter."""
        # A rank without comparisons runs a dummy: ZeRO-3 gathers parameters collectively.
        items = comparisons or self._comparisons[:1]
        device = self._distributed.device
        batch = pad([sequence for item in items for sequence in item.sequences]).to(device)
        scores = self._normalization(self._module(*batch))
        widest = max(len(item.sequences) for item in items)
        scores_BK = scores.new_zeros(len(items), widest)
        present_BK = torch.zeros(len(items), widest, dtype=torch.bool, device=device)
        for row, item in enumerate(items):
            present_BK[row, : len(item.sequences)] = True
        scores_BK = scores_BK.masked_scatter(present_BK, scores)
        best_B = torch.tensor([item.best for item in items], device=device)
        margin_B = torch.tensor([item.margin for item in items], device=device)
        loss_B, metrics = best_of_n_loss(scores_BK, best_B, present_BK, margin_B)
        if not comparisons:
            return 0.0 * loss_B, {name: 0.0 * value for name, value in metrics.items()}
        return loss_B, metrics

    # Parts of the work

    def _batches(self, epoch: int) -> Iterator[list[Comparison]]:
        """Yield the comparisons of each optimizer step of all ranks; the last one may be smaller, none is dropped."""
        order = np.random.default_rng([self._config.seed, epoch]).permutation(len(self._comparisons))
        for start in range(0, len(order), self._config.batch_size):
            yield [self._comparisons[i] for i in order[start : start + self._config.batch_size]]

    def _microbatches(self, batch: Sequence[Comparison]) -> list[Sequence[Comparison]]:
        """Split this rank's share into as many parts as on every other rank; parts may be empty."""
        ranks, size = self._distributed.world_size, self._config.microbatch_size
        own = batch[self._distributed.rank :: ranks]
        count = max(1, -(-len(batch) // (ranks * size)))
        return [own[i * size : (i + 1) * size] for i in range(count)]

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        if not self._heldout:
            return {}
        sums = [self._losses(own)[1] for own in self._microbatches(self._heldout)]
        return self._means(sums, len(self._heldout), "eval/")

    def _normalize(self) -> None:
        """Reset gain and bias, and fit them to the raw scores."""
        if not self._config.normalization.num_samples:
            return
        self._normalization = Normalization()
        self._normalization = fit(self._score_samples())

    @torch.no_grad()
    def _score_samples(self) -> torch.Tensor:
        """Return the (B,) normalized scores of all ranks' samples; a collective with equally many passes on each."""
        size = self._config.microbatch_size
        longest = -(-self._config.normalization.num_samples // self._distributed.world_size)
        parts = []
        for start in range(0, longest, size):
            own = self._samples[start : start + size]
            scores_B = self._module(*pad(own or self._samples[:1]).to(self._distributed.device))
            parts.append(scores_B[: len(own)].double().cpu())
        return self._normalization(self._distributed.gather(torch.cat(parts)))

    def _sample_statistics(self) -> dict[str, float]:
        """Return gain and bias, and mean and variance of the samples' normalized rewards: 0 and 1."""
        record = {"reward_model/gain": self._normalization.gain, "reward_model/bias": self._normalization.bias}
        if not self._config.normalization.num_samples:
            return record
        mean, variance = moments(self._score_samples())
        return record | {"reward_model/normalized_mean": float(mean), "reward_model/normalized_var": float(variance)}

    def _means(self, sums: Sequence[dict[str, torch.Tensor]], count: int, prefix: str) -> dict[str, float]:
        """Add the sums of microbatches and ranks, and divide by the number of comparisons."""
        names = sorted(sums[0])
        totals = torch.tensor([sum(float(part[name]) for part in sums) for name in names], dtype=torch.float64)
        totals = self._distributed.sum(totals).tolist()
        return {f"{prefix}{name}": total / count for name, total in zip(names, totals, strict=True)}

    # Files

    def _load(self, path: str, split: str, *, shuffled: bool) -> list[Comparison]:
        data = self._config.data
        lengths = Lengths(query=data.query_tokens, response=data.response_tokens, total=data.max_tokens)
        rows = self._distributed.together(lambda: load_rows(path, split, say=self._say))
        order = np.random.default_rng(self._config.seed).permutation(len(rows)) if shuffled else np.arange(len(rows))
        indices = order[: data.max_comparisons].tolist()
        return self._distributed.together(
            lambda: read_comparisons(rows.select(indices), self._tokenizer, lengths, of=path)
        )

    def _make_directory(self) -> Path:
        name = self._config.run_name or f"reward_model-{datetime.now():%Y%m%d-%H%M%S}"
        path = Path(self._distributed.broadcast(str(Path(self._config.run_root) / name)))

        def make() -> None:
            if not self._distributed.is_main:
                return
            if path.exists() and any(path.iterdir()):
                raise ConfigError(f"run directory {path} is not empty; set run_name=<another name>")
            path.mkdir(parents=True, exist_ok=True)
            (path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(redact(asdict(self._config)))))

        self._distributed.together(make)
        return path

    def _open_log(self, directory: Path) -> MetricsLog | None:
        if not self._distributed.is_main:
            return None
        return MetricsLog(directory / "metrics.jsonl", self._config.logger, run_config=redact(asdict(self._config)))

    def _report(self, metrics: MetricsLog | None, numbers: dict[str, float]) -> None:
        if metrics is not None:
            metrics.write(self.num_updates, numbers)
            values = {
                name.rpartition("/")[2] if "eval/" not in name else name: value for name, value in numbers.items()
            }
            self._say(f"update {self.num_updates:5d}  " + "  ".join(f"{k} {v:.4g}" for k, v in values.items()))

    def _say(self, text: str) -> None:
        if self._distributed.is_main:
            print(text, flush=True)
