"""Training a reward model, from comparisons to a checkpoint. All ranks of the script call `train`.

    samples of the pretrained model ─► normalise ─► one epoch over comparisons ─► reset, normalise again ─► save

The permutation of the data is one for all ranks; what ranks sample for the normalisation has a seed of each (G6). The
loss is the mean over the comparisons of an optimizer step on all ranks, however they are cut into microbatches.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rewards.model.classifier import RewardModel
from rewards.model.padding import pad
from rewards.model.reward import StopRule, token_id_of
from rewards.model.tokenizing import text_ids
from rollout.errors import ConfigError, DataError, TrainingError
from trainer.data.datasets import load_rows
from trainer.distributed.distributed import Distributed
from trainer.model.decoder import disable_randomness
from trainer.observe.metrics_log import MetricsLog
from trainer.reward_model.config import RewardModelConfig
from trainer.reward_model.data import Comparison, Lengths, query_ids, read_comparisons
from trainer.reward_model.head import init_reward_head
from trainer.reward_model.losses import best_of_n_loss
from trainer.reward_model.normalization import Normalization, fit
from trainer.reward_model.sampling import SEED_STRIDE, sample_responses
from trainer.reward_model.saving import save
from trainer.update.optimizer import make_optimizer
from trainer.update.schedule import learning_rate


def train(config: RewardModelConfig) -> None:
    """Train as configured. Raises `LockstepError` on every rank when it cannot go on."""
    # Before the ranks meet: under ZeRO-3 everything that is loaded later is partitioned, and cannot generate by itself.
    samples = normalization_samples(config)
    distributed = Distributed.start(dtype=config.model.dtype, max_grad_norm=config.optimizer.max_grad_norm)
    try:
        RewardModelTraining(config, distributed, samples).run()
    finally:
        distributed.close()


class RewardModelTraining:
    """The parts of the training on this rank."""

    def __init__(self, config: RewardModelConfig, distributed: Distributed, samples: Sequence[Sequence[int]]) -> None:
        """samples: query and response as ids, this rank's share of what rewards are normalised on."""
        self._config = config
        self._distributed = distributed
        self._samples = samples
        torch.manual_seed(config.seed)
        self._tokenizer = AutoTokenizer.from_pretrained(
            config.model.path, trust_remote_code=config.model.trust_remote_code
        )
        self._comparisons = self._load(config.data.path, config.data.split, shuffled=True)
        self._heldout = (
            self._load(config.data.heldout_path, config.data.heldout_split, shuffled=False)
            if config.data.heldout_path
            else []
        )
        model = make_model(config, distributed, pad_token_id=self._tokenizer.pad_token_id)
        self._module = distributed.prepare(model, make_optimizer(model, config.optimizer))
        self._normalization = Normalization()
        self.num_updates = 0

    def run(self) -> None:
        """The whole training; the model is in `<run directory>/model`."""
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
            save(
                directory / "model", unwrap(self._distributed), self._normalization, self._tokenizer, self._distributed
            )
            self._say(f"model          {directory / 'model'}")
        finally:
            if metrics is not None:
                metrics.close()

    # One optimizer step

    def _update(self, batch: Sequence[Comparison], total_updates: int) -> dict[str, float]:
        """One optimizer step on these comparisons of all ranks."""
        lr = learning_rate(
            self.num_updates,
            peak=self._config.optimizer.lr,
            schedule=self._config.optimizer.schedule,
            warmup_updates=self._config.optimizer.warmup_updates,
            total_updates=total_updates,
            final_fraction=self._config.optimizer.final_lr_fraction,
        )
        sums: dict[str, float] = {}
        microbatches = self._microbatches(batch)
        for number, own in enumerate(microbatches):
            with self._distributed.accumulate(is_last=number == len(microbatches) - 1) as backward:
                loss_B, numbers = self._losses(own)
                # Ranks average gradients; the loss is a sum over them.
                backward(loss_B.sum() * (self._distributed.world_size / len(batch)))
            for name, value in numbers.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        grad_norm = self._distributed.gradient_norm()
        if not math.isfinite(grad_norm):
            raise TrainingError(
                f"update {self.num_updates + 1}: the gradient norm is {grad_norm}; nothing was updated, start again "
                "with a lower optimizer.lr"
            )
        self._distributed.step(lr, grad_norm)
        self.num_updates += 1
        return self._means(sums, len(batch)) | {"optim/lr": lr, "optim/grad_norm": grad_norm}

    def _losses(self, comparisons: Sequence[Comparison]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Losses of comparisons and sums for metrics; without any, a zero that still reaches every parameter."""
        # A rank with fewer microbatches runs a dummy: ZeRO-3 gathers parameters collectively.
        chosen = comparisons or self._comparisons[:1]
        device = self._distributed.device
        batch = pad([sequence for item in chosen for sequence in item.sequences]).to(device)
        scores = self._normalization(self._module(*batch))
        widest = max(len(item.sequences) for item in chosen)
        scores_BK = scores.new_zeros(len(chosen), widest)
        there_BK = torch.zeros(len(chosen), widest, dtype=torch.bool, device=device)
        for row, item in enumerate(chosen):
            there_BK[row, : len(item.sequences)] = True
        scores_BK = scores_BK.masked_scatter(there_BK, scores)
        best_B = torch.tensor([item.best for item in chosen], device=device)
        margin_B = torch.tensor([item.margin for item in chosen], device=device)
        loss_B, metrics = best_of_n_loss(scores_BK, best_B, there_BK, margin_B)
        if not comparisons:
            return 0.0 * loss_B, {name: 0.0 * value for name, value in metrics.items()}
        return loss_B, metrics

    # Parts of the work

    def _batches(self, epoch: int) -> Iterator[list[Comparison]]:
        """The comparisons of each optimizer step, all ranks together; the last one may be smaller, none is dropped."""
        order = np.random.default_rng([self._config.seed, epoch]).permutation(len(self._comparisons))
        for start in range(0, len(order), self._config.batch_size):
            yield [self._comparisons[i] for i in order[start : start + self._config.batch_size]]

    def _microbatches(self, batch: Sequence[Comparison]) -> list[Sequence[Comparison]]:
        """This rank's share, in as many parts as every other rank's; parts may be empty."""
        ranks, size = self._distributed.world_size, self._config.microbatch_size
        own = batch[self._distributed.rank :: ranks]
        count = max(1, -(-len(batch) // (ranks * size)))
        return [own[i * size : (i + 1) * size] for i in range(count)]

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        if not self._heldout:
            return {}
        sums: dict[str, float] = {}
        for own in self._microbatches(self._heldout):
            _, numbers = self._losses(own)
            for name, value in numbers.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        return {f"eval/{name}": value for name, value in self._means(sums, len(self._heldout), prefix="").items()}

    def _normalize(self) -> None:
        """Gain and bias anew, from raw scores (R3)."""
        if not self._config.normalization.num_samples:
            return
        self._normalization = Normalization()
        scores_B = self._score_samples()
        self._normalization = fit(self._distributed.gather(scores_B))

    @torch.no_grad()
    def _score_samples(self) -> torch.Tensor:
        """(B,) normalised scores of this rank's samples; every rank runs the same number of passes."""
        size = self._config.microbatch_size
        longest = -(-self._config.normalization.num_samples // self._distributed.world_size)
        parts = []
        for start in range(0, longest, size):
            own = self._samples[start : start + size]
            scores_B = self._module(*pad(own or self._samples[:1]).to(self._distributed.device))
            parts.append(scores_B[: len(own)].double().cpu())
        return self._normalization(torch.cat(parts))

    def _sample_statistics(self) -> dict[str, float]:
        """Mean and variance of the samples' rewards after normalisation: 0 and 1."""
        record = {"reward_model/gain": self._normalization.gain, "reward_model/bias": self._normalization.bias}
        if not self._config.normalization.num_samples:
            return record
        scores_B = self._score_samples()
        total = self._distributed.sum(
            torch.stack([scores_B.sum(), scores_B.square().sum(), torch.tensor(float(len(scores_B)))])
        )
        mean = float(total[0] / total[2])
        return record | {
            "reward_model/normalized_mean": mean,
            "reward_model/normalized_var": float(total[1] / total[2]) - mean**2,
        }

    def _means(self, sums: dict[str, float], count: int, *, prefix: str = "reward_model/") -> dict[str, float]:
        names = sorted(sums)
        totals = self._distributed.sum(torch.tensor([sums[name] for name in names], dtype=torch.float64)).tolist()
        return {f"{prefix}{name}": total / count for name, total in zip(names, totals, strict=True)}

    # Files

    def _load(self, path: str, split: str, *, shuffled: bool) -> list[Comparison]:
        data = self._config.data
        lengths = Lengths(query=data.query_tokens, response=data.response_tokens, total=data.max_tokens)
        rows = self._distributed.together(lambda: load_rows(path, split))
        order = np.random.default_rng(self._config.seed).permutation(len(rows)) if shuffled else np.arange(len(rows))
        chosen = order[: data.max_comparisons].tolist()
        return self._distributed.together(lambda: read_comparisons((rows[i] for i in chosen), self._tokenizer, lengths))

    def _make_directory(self) -> Path:
        name = self._config.run_name
        if name is None:
            name = f"reward_model-{datetime.now():%Y%m%d-%H%M%S}"
        path = Path(self._distributed.broadcast(str(Path(self._config.run_root) / name)))

        def make() -> None:
            if not self._distributed.is_main:
                return
            if path.exists() and any(path.iterdir()):
                raise ConfigError(f"run directory {path} is not empty; set run_name=<another name>")
            path.mkdir(parents=True, exist_ok=True)
            (path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(self._config)))

        self._distributed.together(make)
        return path

    def _open_log(self, directory: Path) -> MetricsLog | None:
        if not self._distributed.is_main:
            return None
        run_config = OmegaConf.to_container(OmegaConf.structured(self._config))
        assert isinstance(run_config, dict)
        return MetricsLog(
            directory / "metrics.jsonl",
            self._config.logger,
            run_config={str(name): value for name, value in run_config.items()},
        )

    def _report(self, metrics: MetricsLog | None, numbers: dict[str, float]) -> None:
        if metrics is not None:
            metrics.write(self.num_updates, numbers)
            shown = {name.rpartition("/")[2] if "eval/" not in name else name: value for name, value in numbers.items()}
            self._say(f"update {self.num_updates:5d}  " + "  ".join(f"{k} {v:.4g}" for k, v in shown.items()))

    def _say(self, text: str) -> None:
        if self._distributed.is_main:
            print(text, flush=True)


def unwrap(distributed: Distributed) -> RewardModel:
    module = distributed.unwrapped
    assert isinstance(module, RewardModel)
    return module


def make_model(config: RewardModelConfig, distributed: Distributed, *, pad_token_id: int | None) -> RewardModel:
    """A sequence classifier with one output on the pretrained trunk, its head fresh or as it was. No dropout.

    Raises:
        ConfigError: nothing loadable is there, or the architecture has no sequence classifier with a plain head.
    """
    settings = config.model
    try:
        model_config = AutoConfig.from_pretrained(
            settings.path, num_labels=1, trust_remote_code=settings.trust_remote_code
        )
        model_config.pad_token_id = pad_token_id
        model = AutoModelForSequenceClassification.from_pretrained(
            settings.path, config=model_config, dtype="float32", trust_remote_code=settings.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path={settings.path}: no sequence classifier can be made of it ({error}); expected a decoder of "
            "transformers or a trained reward model"
        ) from error
    module = RewardModel(model)
    if not module.is_decoder:
        raise ConfigError(
            f"model.path={settings.path} is a {type(model).__name__} without a linear head named `score`; "
            "expected a decoder (GPT-2, Qwen3, Llama, ...)"
        )
    if settings.new_head:
        head = model.get_submodule("score")
        assert isinstance(head, torch.nn.Linear)
        with distributed.whole_parameters(head):
            init_reward_head(head, generator=torch.Generator().manual_seed(config.seed))
    disable_randomness(model)
    model.train()  # in eval mode, in which models are loaded, transformers checkpoints nothing
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return module


def normalization_samples(config: RewardModelConfig) -> list[list[int]]:
    """Query and response ids of this process's share of the samples, cut at the stop; empty without normalisation.

    Raises:
        ConfigError: the model cannot be loaded.
        DataError: the queries cannot.
    """
    settings = config.normalization
    if not settings.num_samples:
        return []
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    path = settings.model_path or config.model.path
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"normalization: {path} has no loadable tokenizer ({error})") from error
    rows = load_rows(settings.queries_path or config.data.path, config.data.split)
    order = np.random.default_rng([config.seed, 1]).permutation(len(rows))
    # More samples than rows: queries are used again, for other responses.
    own = [rows[int(order[i % len(order)])] for i in range(rank, settings.num_samples, ranks)]
    if not own:
        raise DataError(f"normalization.num_samples={settings.num_samples} leaves rank {rank} of {ranks} without any")
    lengths = Lengths(query=config.data.query_tokens)
    try:
        queries = [query_ids(row, tokenizer, lengths) for row in own]
    except DataError as error:
        raise DataError(
            f"normalization: {error}; set normalization.queries_path=<rows with prompt>, or normalization.num_samples=0"
        ) from error
    if all(isinstance(row.get("response"), str) for row in own):
        responses = [text_ids(tokenizer, row["response"], special_tokens=False) for row in own]
    else:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype="float32", trust_remote_code=config.model.trust_remote_code
        )
        # The ranks have not met yet, so no GPU is this rank's by default.
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
        model.to(device)  # type: ignore[arg-type]  # a union of auto classes
        responses = sample_responses(
            model,
            queries,
            length=settings.response_tokens,
            temperature=settings.temperature,
            seed=config.seed + rank * SEED_STRIDE,
        )
    if settings.stop is not None:
        rule = StopRule(token_ids=frozenset({token_id_of(tokenizer, settings.stop)}), after=settings.stop_after)
        responses = [rule.truncate(response) for response in responses]
    return [[*query, *response] for query, response in zip(queries, responses, strict=True)]
