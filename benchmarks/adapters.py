"""LoRA updates sent as adapters, merged into the weights, and full updates: what of them samples, and what travels.

    python benchmarks/adapters.py [--model models/smollm2-135m-instruct] [--rows 32] [--quick] [--json]

Engine and trainer compute in bfloat16, the trainer's weights are float32. The same rows, sampled before any update, are
scored by both after updates of two sizes. Columns:

* effect: mean |Δ log π| that the update makes, in float32: what it should do.
* to the trainer: mean |Δ log π| between engine and trainer, both in bfloat16; without an update, the noise floor.
* share, correlation: what the engine holds, computed in float32: slope and correlation of its change of log π over the
  exact one. 1 and 1: it holds the whole update. A low correlation: its change is mostly rounding.
* changed: share of the sent numbers that the update changes.

Sync times are medians, in one process each, over gloo; both engines hold the same model.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness.results import argument_parser, report
from harness.workloads import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from lockstep.rollout.engine.adapter_receiver import A, B
from lockstep.rollout.engine.adapters import AdapterSettings
from lockstep.rollout.engine.embedded import EmbeddedEngine
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.weights.source import ZeroSource
from lockstep.rollout.weights.sync import SyncReport, WeightSync
from lockstep.trainer.config.groups.model_settings import LoraConfig
from lockstep.trainer.model.policy import Policy

RANK, CONTEXT = 16, 256
SIZES = {"small": 1e-5, "usual": 1e-3}
"""Standard deviation of B, which a new adapter has as 0. Of all weights in a full update: `FULL` times that."""
FULL = 0.18
TOPICS = ("rivers", "a clock", "winter", "bread", "an old map", "music", "the harbor", "chess")


@dataclass(frozen=True, slots=True)
class Scores:
    """Log π of all sampled tokens, by row."""

    rows: list[torch.Tensor]

    @property
    def tokens(self) -> torch.Tensor:
        return torch.cat(self.rows)


class Trained:
    """A policy with float32 weights, exact or in the trainer's mixed precision."""

    def __init__(self, path: Path, *, lora: LoraConfig | None) -> None:
        self.policy = Policy.from_pretrained(path, dtype="float32", compute_dtype="bfloat16", lora=lora)
        self.start = {name: param.detach().clone() for name, param in self._trained()}

    def _trained(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((name, param) for name, param in self.policy.named_parameters() if param.requires_grad)

    @torch.no_grad()
    def update(self, size: float) -> None:
        """Set the weights to those of the start plus noise: of B in adapters, of all matrices otherwise."""
        generator = torch.Generator().manual_seed(0)
        is_adapted = any("lora_" in name for name in self.start)
        for name, param in self._trained():
            param.copy_(self.start[name])
            if is_adapted and "lora_B" in name:
                param.add_(size * torch.randn(param.shape, generator=generator))
            elif not is_adapted and param.dim() == 2 and "embed" not in name:
                param.add_(FULL * size * torch.randn(param.shape, generator=generator))

    def score(self, rows: list[tuple[list[int], int]], *, exact: bool) -> Scores:
        with torch.autocast("cpu", torch.bfloat16, enabled=not exact):
            return scores(self.policy.causal_lm, rows)

    def canary(self, ids: list[int]) -> list[float]:
        return self.score([(ids, 1)], exact=False).tokens.tolist()


@torch.no_grad()
def scores(model: PreTrainedModel, rows: list[tuple[list[int], int]]) -> Scores:
    logps = []
    for ids, prompt in rows:
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
        logp = torch.log_softmax(logits.double(), -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        logps.append(logp[prompt - 1 :])
    return Scores(logps)


@torch.no_grad()
def held_scores(path: Path, sent: dict[str, torch.Tensor], rows: list[tuple[list[int], int]]) -> Scores:
    """Score with the numbers that the engine holds, in float32: the checkpoint's in bfloat16, and the sent ones."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).float()
    weights = model.state_dict()
    for name, tensor in sent.items():
        if name.endswith(A):
            weights[name.replace(A, ".weight")] += sent[name.replace(A, B)].float() @ tensor.float()
        elif not name.endswith(B):
            weights[name].copy_(tensor)
    return scores(model, rows)


@contextmanager
def engine_of(path: Path, loop: BackgroundLoop, log: Path, *, adapters: bool) -> Iterator[EmbeddedEngine]:
    engine = EmbeddedEngine(
        EngineSettings(
            model=path,
            dtype="bfloat16",
            max_model_len=CONTEXT,
            kv_cache_gib=0.25,
            adapters=AdapterSettings(max_rank=RANK) if adapters else None,
        ),
        loop=loop,
        log_path=log,
    )
    try:
        yield engine
    finally:
        loop.run(engine.close())


def engine_scores(engine: EmbeddedEngine, rows: list[tuple[list[int], int]]) -> Scores:
    return Scores([torch.tensor(engine.loop.run(engine.score(ids))).double()[prompt - 1 :] for ids, prompt in rows])


def sampled_rows(engine: EmbeddedEngine, path: Path, number: int) -> list[tuple[list[int], int]]:
    """Sample answers, all by the base, and return ids with the length of the prompt."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = []
    for index in range(number):
        message = {"role": "user", "content": f"Write a few sentences about {TOPICS[index % len(TOPICS)]}."}
        prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)
        call = engine.loop.run(engine.generate(prompt, Sampling(max_tokens=96, ignore_eos=True, seed=index)))
        rows.append(([*call.prompt_ids, *call.sampled_ids], len(prompt)))
    return rows


def slope_and_correlation(change: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    change, exact = change - change.mean(), exact - exact.mean()
    slope = (change @ exact / (exact @ exact)).item()
    return slope, (change @ exact / (change.norm() * exact.norm()).clamp(min=1e-30)).item()


def sent_by(trained: Trained, *, adapters: bool) -> dict[str, torch.Tensor]:
    source = ZeroSource(trained.policy.model, dtype=torch.bfloat16, adapters_only=adapters)
    return {name: tensor.clone() for name, tensor in source}


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    """Return the share of numbers that differ, in layers that adapters may change."""
    layers = [name for name in before if "_proj" in name]
    return sum(int((before[name] != after[name]).sum()) for name in layers) / sum(before[n].numel() for n in layers)


def measure(
    title: str,
    path: Path,
    trained: Trained,
    engine: EmbeddedEngine,
    rows: list[tuple[list[int], int]],
    sizes: dict[str, float],
    repeats: int,
) -> tuple[list[dict[str, Any]], list[SyncReport]]:
    """Return a row for no update and for each size, and the reports of all syncs but the first."""
    sync = WeightSync(module=trained.policy.model, engines=[engine], score_canary=trained.canary, deadline_s=600)
    try:
        trained.update(0.0)
        sync.push(1)
        sent_before = sent_by(trained, adapters=engine.takes_adapters)
        exact_before, held_before = trained.score(rows, exact=True), held_scores(path, sent_before, rows)
        floor = (engine_scores(engine, rows).tokens - trained.score(rows, exact=False).tokens).abs().mean().item()
        table: list[dict[str, Any]] = [{"sent": title, "update": "none", "to the trainer": floor}]
        reports = []
        for version, (name, size) in enumerate(sizes.items(), 2):
            trained.update(size)
            reports += [sync.push(version) for _ in range(repeats)]
            sent_now = sent_by(trained, adapters=engine.takes_adapters)
            exact, held_after = trained.score(rows, exact=True), held_scores(path, sent_now, rows)
            slope, correlation = slope_and_correlation(
                held_after.tokens - held_before.tokens, exact.tokens - exact_before.tokens
            )
            difference = engine_scores(engine, rows).tokens - trained.score(rows, exact=False).tokens
            table.append(
                {
                    "sent": title,
                    "update": name,
                    "to the trainer": difference.abs().mean().item(),
                    "effect": (exact.tokens - exact_before.tokens).abs().mean().item(),
                    "share": slope,
                    "correlation": correlation,
                    "changed": changed(sent_before, sent_now),
                }
            )
        return table, reports
    finally:
        sync.close()


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m-instruct")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3, help="syncs of each update")
    args = parser.parse_args()
    sizes = {"usual": SIZES["usual"]} if args.quick else SIZES
    number, repeats = (4, 1) if args.quick else (args.rows, args.repeats)
    lora = LoraConfig(rank=RANK, alpha=2 * RANK)
    sides: tuple[tuple[str, LoraConfig | None, bool], ...] = (
        ("adapters", lora, True),
        ("merged", lora, False),
        ("all weights", None, False),
    )
    table: list[dict[str, Any]] = []
    syncs: dict[str, list[SyncReport]] = {}
    rows: list[tuple[list[int], int]] = []
    with tempfile.TemporaryDirectory() as logs, BackgroundLoop() as loop:
        for title, settings, adapters in sides:
            with engine_of(args.model, loop, Path(logs) / "engine.log", adapters=adapters) as engine:
                rows = rows or sampled_rows(engine, args.model, number)
                lines, syncs[title] = measure(
                    title, args.model, Trained(args.model, lora=settings), engine, rows, sizes, repeats
                )
                table += lines

    def median(title: str, of: Callable[[SyncReport], float]) -> float:
        return statistics.median(map(of, syncs[title]))

    numbers: dict[str, object] = {
        "bytes_of_merged_over_adapters": median("merged", lambda r: r.bytes) / median("adapters", lambda r: r.bytes),
        "pause_of_merged_over_adapters": median("merged", lambda r: r.pause_s)
        / median("adapters", lambda r: r.pause_s),
    }
    for title in syncs:
        numbers[f"{title}: MB"] = median(title, lambda r: r.bytes) / 1e6
        numbers[f"{title}: pause [s]"] = median(title, lambda r: r.pause_s)
    report("adapters", table, numbers, as_json=args.json)


if __name__ == "__main__":
    main()
