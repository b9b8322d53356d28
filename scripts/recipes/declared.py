"""Declarations of the recipes: experiment, published value with its source, tolerance, machine, and assumed rates.

docs/recipes.md and `make reproduce` derive from these. A published value has a source that a reader can open; values
that were measured with Lockstep itself say so. Assumed rates are inputs of an estimate and no measurements.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Point of the expected curve: a metric of metrics.jsonl at an update, between two values."""

    update: int
    metric: str
    low: float
    high: float
    found: str
    """Source of the bound, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """Inputs of the estimate of hours that nothing measured on GPUs."""

    sampled_tokens: int
    """Mean number of sampled tokens per rollout."""
    read_tokens: int
    """Mean number of prompt and result tokens per rollout."""
    tokens_per_s: int
    """Sampled tokens per second of the engine on one GPU."""
    heldout_rollouts: int
    """Rollouts of one evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    name: str
    title: str
    experiment: str
    """Value of `experiment=`."""
    overrides: tuple[str, ...] = ()
    model: str
    data: str
    published: float
    tolerance: float
    """Largest distance of a reproduced value from the published one."""
    why_tolerance: str
    heldout: str = ""
    """Name of the evaluated set in eval.sets; empty for data.heldout_path."""
    measure: str = "pass@1"
    """pass@1, or reward_mean."""
    parts: tuple[str, ...] = ()
    """Values of the column eval.by, of which the measure is the plain mean; empty for the whole set."""
    at: str = "last"
    """Evaluation that is judged: the last one, or the best one, where the source reports the highest of a run."""
    source: str
    """Where the number is, in words."""
    links: tuple[str, ...]
    """Addresses of the number and of the settings."""
    gpus: int
    """0: a CPU."""
    gpu_gib: int = 0
    """Memory of one GPU that the recipe is planned for [GiB]."""
    launch: str = "single"
    """File of configs/accelerate/."""
    packages: tuple[str, ...] = ()
    """Importable modules of optional packages."""
    install: str = ""
    """Command that installs them."""
    curve: tuple[Bound, ...] = ()
    assumed: Assumed | None = None
    """None where no hours are estimated."""

    def __post_init__(self) -> None:
        assert self.measure in ("pass@1", "reward_mean"), self.measure
        assert self.at in ("last", "best"), self.at
        assert self.measure == "reward_mean" or not self.parts, "means over parts are means of rewards"

    @property
    def metric(self) -> str:
        """Name of the judged metric in metrics.jsonl; with parts, the pattern of their names."""
        prefix = f"eval/{self.heldout}/" if self.heldout else "eval/"
        return prefix + (f"{{{','.join(self.parts)}}}/" if self.parts else "") + self.measure


VERL = "https://github.com/volcengine/verl/blob/main/docs/algo/baseline.md"
VERL_LOGS = "https://github.com/eric-haibin-lin/verl-data/blob/experiments/gsm8k/"
SKYRL = "https://github.com/NovaSky-AI/SkyRL/blob/main/docs/content/docs/recipes/overview.mdx"
PRIME_RL = "https://github.com/PrimeIntellect-ai/prime-rl/blob/main/"
GSM8K = "https://huggingface.co/datasets/openai/gsm8k (7,473 rows, 1,319 held out)"
TWO_SAMPLES = "twice the sampling error of two independent evaluations of 1,319 questions, rounded up"


def gsm8k_lora(size: str, *, published: float, tolerance: float, log: str, tokens_per_s: int, gpu_gib: int) -> Recipe:
    return Recipe(
        name=f"gsm8k_lora_{size.lower()}",
        title=f"GSM8K, GRPO with LoRA, Qwen2.5-{size}-Instruct",
        experiment="gsm8k_lora",
        overrides=(f"model.path=Qwen/Qwen2.5-{size}-Instruct",),
        model=f"Qwen/Qwen2.5-{size}-Instruct",
        data=GSM8K,
        published=published,
        tolerance=tolerance,
        why_tolerance=TWO_SAMPLES,
        source=f"verl, table of algorithm baselines: GRPO-LoRA, test score {published * 100:.1f}, greedy, one run",
        links=(VERL, VERL_LOGS + log),
        gpus=2,
        gpu_gib=gpu_gib,
        launch="ddp",
        assumed=Assumed(sampled_tokens=500, read_tokens=103, tokens_per_s=tokens_per_s, heldout_rollouts=1319),
    )


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="demo_calculator",
            title="The demo: a calculator, a model of 0.5 M parameters, on a CPU",
            experiment="demo",
            overrides=("updates=20", "eval.every=10", "eval.before_training=true", "eval.prompts=null"),
            model="models/calculator (`make model`)",
            data="data/demo/calculator (4,096 rows, 256 held out)",
            published=0.992,
            tolerance=0.03,
            why_tolerance="twice the sampling error of two evaluations of 256 rows near 0.98, rounded up",
            source="Lockstep itself, measured with seed 0 on two CPU cores: 0.020 before, 0.992 after 10 and "
            "20 updates",
            links=(),
            gpus=0,
            curve=(Bound(update=10, metric="eval/pass@1", low=0.9, high=1.0, found="seed 0 has 0.992"),),
        ),
        gsm8k_lora(
            "0.5B",
            published=0.543,
            tolerance=0.04,
            log="Qwen2.5-0.5B-bsz64_2-prompt512-resp1024-lorarank32-score0.543.log",
            tokens_per_s=20_000,
            gpu_gib=24,
        ),
        gsm8k_lora(
            "1.5B",
            published=0.779,
            tolerance=0.04,
            log="Qwen2.5-1.5B-bsz64_2-prompt512-resp1024-lorarank32-score0.779.log",
            tokens_per_s=10_000,
            gpu_gib=24,
        ),
        gsm8k_lora(
            "3B",
            published=0.861,
            tolerance=0.03,
            log="Qwen2.5-3B-bsz64_2-prompt512-resp1024-lorarank32-score0.861.log",
            tokens_per_s=6_000,
            gpu_gib=40,
        ),
        Recipe(
            name="gsm8k_ppo",
            title="GSM8K, PPO with a critic, Qwen2.5-0.5B-Instruct",
            experiment="gsm8k_ppo",
            model="Qwen/Qwen2.5-0.5B-Instruct, also the critic's start",
            data=GSM8K,
            published=0.567,
            tolerance=0.04,
            why_tolerance=TWO_SAMPLES,
            source="verl, table of algorithm baselines: PPO, test score 56.7, greedy, one run",
            links=(VERL, VERL_LOGS + "Qwen2.5-0.5B-bsz256_2-prompt1024-resp512-0.567.log"),
            gpus=1,
            gpu_gib=40,
            curve=(
                Bound(update=4, metric="reward/mean", low=0.0, high=0.1, found="step:0 of verl's log has 0.012"),
                Bound(update=360, metric="eval/pass@1", low=0.45, high=0.56, found="step:89 of verl's log has 0.506"),
            ),
            assumed=Assumed(sampled_tokens=280, read_tokens=104, tokens_per_s=20_000, heldout_rollouts=1319),
        ),
        Recipe(
            name="dapo_math",
            title="DAPO-Math-17k to AIME 2024, Qwen3-1.7B-Base",
            experiment="dapo_math",
            model="Qwen/Qwen3-1.7B-Base",
            data="https://huggingface.co/datasets/BytedTsinghua-SIA/DAPO-Math-17k; held out "
            "https://huggingface.co/datasets/HuggingFaceH4/aime_2024 (30 rows)",
            published=0.144,
            tolerance=0.04,
            why_tolerance="the sampling error of 30 problems x 32 answers, twice, and the highest of one run; "
            "SkyRL's run that filters groups without spread reached 0.169",
            heldout="aime",
            at="best",
            source="SkyRL, overview of recipes: DAPO without dynamic sampling, highest mean@32 of the run 0.144 "
            "(step 285)",
            links=(
                SKYRL,
                "https://github.com/NovaSky-AI/SkyRL/blob/main/examples/train/algorithms/dapo/run_dapo_qwen3_1.7b_aime.sh",
            ),
            gpus=8,
            gpu_gib=80,
            launch="zero2",
            packages=("math_verify",),
            install="pip install 'lockstep-rl[math]'",
            assumed=Assumed(sampled_tokens=2000, read_tokens=200, tokens_per_s=8_000, heldout_rollouts=960),
        ),
        Recipe(
            name="reverse_text",
            title="Short texts backwards, Qwen3-0.6B",
            experiment="reverse_text",
            model="PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT, after prime-rl's fine-tuning of Qwen3-0.6B",
            data="https://huggingface.co/datasets/PrimeIntellect/Reverse-Text-RL; evaluated on training rows, "
            "as prime-rl does",
            published=0.8,
            tolerance=0.05,
            why_tolerance='prime-rl says "~0.8", from 20 prompts x 3 samples',
            measure="reward_mean",
            source='prime-rl, example reverse-text: "average reward of ~0.8" after training, "~0.05" of Qwen3-0.6B',
            links=(
                PRIME_RL + "examples/basic/reverse-text/README.md",
                PRIME_RL + "examples/basic/reverse-text/rl.toml",
                PRIME_RL + "tests/integration/test_reverse_text.py",
            ),
            gpus=1,
            gpu_gib=24,
            curve=(
                Bound(
                    update=20,
                    metric="reward/mean",
                    low=0.6,
                    high=1.0,
                    found="prime-rl's integration test asks for at least 0.6 at the end",
                ),
            ),
            assumed=Assumed(sampled_tokens=60, read_tokens=60, tokens_per_s=20_000, heldout_rollouts=384),
        ),
        Recipe(
            name="search_r1",
            title="Search-R1: questions with a search engine, Qwen2.5-3B-Instruct",
            experiment="search_r1",
            model="Qwen/Qwen2.5-3B-Instruct",
            data="https://huggingface.co/datasets/PeterJinGo/nq_hotpotqa_train; a search server with the E5 index of "
            "Wikipedia 2018",
            published=0.336,
            tolerance=0.07,
            why_tolerance="wide enough for SkyRL's run of the same task, which reached 0.403 with four turns",
            measure="reward_mean",
            parts=("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle"),
            source="Search-R1, GRPO from Qwen2.5-3B-Instruct: mean exact match of seven test sets 0.336 (NQ 0.397), as "
            "quoted in SkyRL's overview of recipes",
            links=(
                SKYRL,
                "https://arxiv.org/abs/2503.09516",
                "https://github.com/PeterGriffinJin/Search-R1/blob/main/train_grpo.sh",
            ),
            gpus=8,
            gpu_gib=80,
            launch="zero2",
            assumed=Assumed(sampled_tokens=250, read_tokens=1300, tokens_per_s=6_000, heldout_rollouts=51_713),
        ),
    )
}
