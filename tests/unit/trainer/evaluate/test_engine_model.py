"""The model that lm-eval asks: the same ids, log-probabilities and answers as lm-eval's Hugging Face backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="pip install 'lm-eval<0.5' for tasks of lm-eval")

from lm_eval.api.instance import Instance  # type: ignore[import-not-found]
from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found]
from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]

from lockstep.rollout.engine.pool import EnginePool
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.errors import ConfigError, DataError
from lockstep.rollout.records import EngineCall, FinishReason, ImageSpan, VersionSpan
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.config.schema import Config
from lockstep.trainer.evaluate.engine_model import EngineModel, Generation
from lockstep.trainer.evaluate.tasks import TaskRun, Tasks
from tests.fixtures.lm_eval_tasks import NAMES, task_files, text_model, values_by_metric
from tests.fixtures.models import byte_tokenizer, sampled_logprobs

MODEL = text_model()
CONTEXT = 128
"""Length of the fake engine's context: shorter than the longest text."""


class ModelEngine:
    """A member of a pool that computes with the Hugging Face model."""

    name, dtype, vocab_size, max_model_len = "model engine", torch.float32, 512, CONTEXT

    def __init__(self, loop: BackgroundLoop) -> None:
        self.loop = loop
        self.scored: list[list[int]] = []
        self.sampled: list[tuple[list[int], Sampling]] = []

    async def score_ranked(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> tuple[list[float], list[int]]:
        self.scored.append(list(ids))
        with torch.no_grad():
            logits = MODEL(torch.tensor([list(ids)])).logits[0, :-1].float()
        ranks = (logits >= logits.gather(1, torch.tensor(ids[1:])[:, None])).sum(-1)
        return sampled_logprobs(MODEL, tuple(ids[:1]), tuple(ids[1:])), ranks.tolist()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[ImageSpan] = ()
    ) -> EngineCall:
        self.sampled.append((list(prompt_ids), sampling))
        ids, found = list(prompt_ids), []
        room = min(sampling.max_tokens, self.max_model_len - len(ids))
        while len(found) < room and not (found and found[-1] in sampling.stop_token_ids):
            with torch.no_grad():
                found.append(int(MODEL(torch.tensor([ids + found])).logits[0, -1].argmax()))
        stopped = bool(found) and found[-1] in sampling.stop_token_ids
        return EngineCall(
            prompt_ids=tuple(prompt_ids),
            sampled_ids=tuple(found),
            sampled_logprobs=(-1.0,) * len(found),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            version_spans=(VersionSpan(version=0, start=0, end=len(found)),),
        )


@pytest.fixture
def engine() -> Iterator[ModelEngine]:
    with BackgroundLoop() as loop:
        yield ModelEngine(loop)


def model_over(engine: ModelEngine, **settings: Any) -> EngineModel:
    tokenizer = byte_tokenizer()
    given: dict[str, Any] = {"stop_token_ids": (tokenizer.eos_token_id,), "seed": 0, "max_concurrent": 4, **settings}
    return EngineModel(engine=EnginePool([engine]), tokenizer=tokenizer, **given)  # type: ignore[list-item]


def request(kind: str, *arguments: Any, task: str = "task", doc: int = 0) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0, metadata=(task, doc, 1))


def hugging_face(**settings: Any) -> Any:
    return HFLM(pretrained=MODEL, tokenizer=byte_tokenizer(), batch_size=1, **settings)


PAIRS = (("The sky is", " blue"), ("two spaces  ", "then a word"), ("", "no context"), ("end", "\n\nnext"), ("a", "b"))


def test_scores_are_those_of_the_hugging_face_backend(engine: ModelEngine) -> None:
    requests = [request("loglikelihood", *pair) for pair in PAIRS]
    found = model_over(engine).loglikelihood(requests, disable_tqdm=True)
    expected = hugging_face().loglikelihood(requests, disable_tqdm=True)
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_a_continuation_is_greedy_only_if_every_token_is_the_most_probable(engine: ModelEngine) -> None:
    model, tokenizer = model_over(engine), byte_tokenizer()

    def best_after(text: str) -> str:
        call = engine.loop.run(engine.generate(tokenizer.encode(text), Sampling(max_tokens=1)))
        return str(tokenizer.decode(call.sampled_ids))

    # The model samples bytes, of which only ASCII ones are a text of their own.
    prompt, best = next((text, best_after(text)) for text in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if best_after(text).isascii())
    worse = "~" if best != "~" else "!"
    texts = (best, worse, best + worse + worse)
    found = [model.loglikelihood([request("loglikelihood", prompt, text)])[0][1] for text in texts]
    assert found == [True, False, False]


def test_a_long_context_loses_its_beginning_and_is_counted(engine: ModelEngine) -> None:
    model = model_over(engine)
    model.loglikelihood([request("loglikelihood", "x" * 300, " end"), request("loglikelihood", "short", " end")])
    assert (model.num_requests, model.num_truncated) == (2, 1)
    assert sorted(map(len, engine.scored)) == [9, CONTEXT - 1]
    model.generate_until([request("generate_until", "x" * 300, {"until": [], "max_gen_toks": 20})])
    assert len(engine.sampled[0][0]) == CONTEXT - 20
    assert (model.num_requests, model.num_truncated) == (3, 2)


def test_a_continuation_longer_than_the_context_is_refused_before_any_request(engine: ModelEngine) -> None:
    requests = [request("loglikelihood", "short", " end"), request("loglikelihood", "a", "b" * 127)]
    with pytest.raises(DataError, match="a continuation of 127 tokens cannot be scored, expected 1 to 126"):
        model_over(engine).loglikelihood(requests)
    assert engine.scored == []


def test_texts_longer_than_the_context_are_scored_in_windows(engine: ModelEngine) -> None:
    text = "A long text, and every token of it is scored exactly once. " * 6
    (found,) = model_over(engine).loglikelihood_rolling([request("loglikelihood_rolling", text)])
    # Windows of the same length: an engine needs room for the context's first id and one sampled token.
    (expected,) = hugging_face(max_length=CONTEXT - 2).loglikelihood_rolling([request("loglikelihood_rolling", text)])
    assert found == pytest.approx(expected, abs=1e-3, rel=1e-6)
    assert len(engine.scored) == 3


def test_answers_are_those_of_the_hugging_face_backend(engine: ModelEngine) -> None:
    given = [{"until": [], "max_gen_toks": 70}, {"until": ["e", "\n"], "max_gen_toks": 30}, {"max_gen_toks": 5}]
    requests = [request("generate_until", f"prompt {i}", settings, doc=i) for i, settings in enumerate(given)]
    found = model_over(engine).generate_until(requests)
    assert found == hugging_face(max_length=512).generate_until(requests, disable_tqdm=True)


def test_a_stop_text_ends_sampling_soon(engine: ModelEngine) -> None:
    model = model_over(engine)
    whole = model.generate_until([request("generate_until", "Once", {"until": [], "max_gen_toks": 100})])[0]
    assert len(engine.sampled) == 1, "without a stop text the engine samples at once"
    end = whole[8]
    engine.sampled.clear()
    assert model.generate_until([request("generate_until", "Once", {"until": [end], "max_gen_toks": 100})]) == [
        whole[: whole.index(end)]
    ]
    ((_, sampling),) = engine.sampled
    assert sampling.max_tokens == 64


def test_a_control_token_among_the_stop_texts_stops_the_engine(engine: ModelEngine) -> None:
    model = model_over(engine, stop_token_ids=())
    model.generate_until([request("generate_until", "Once", {"until": ["<eos>"], "max_gen_toks": 100})])
    ((_, sampling),) = engine.sampled
    assert (sampling.max_tokens, sampling.stop_token_ids) == (100, (0,))


def test_seeds_depend_on_the_document_and_the_repetition_only(engine: ModelEngine) -> None:
    def seeds(*requests: Instance) -> list[int | None]:
        engine.sampled.clear()
        model_over(engine, max_concurrent=1).generate_until(list(requests))
        return [sampling.seed for _, sampling in engine.sampled]

    settings = {"until": [], "max_gen_toks": 2, "do_sample": True, "temperature": 0.7}
    first, second = (request("generate_until", "Once", settings, doc=doc) for doc in (0, 1))
    together = seeds(first, first, second)
    assert len(set(together)) == 3
    assert seeds(second) == together[2:]
    assert seeds(request("generate_until", "Another prompt", settings)) == together[:1]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (0.0, 256)),
        ({"do_sample": True}, (1.0, 256)),
        ({"do_sample": False, "temperature": 0.7, "max_new_tokens": 9}, (0.0, 9)),
        ({"temperature": 0.7, "num_beams": 1, "top_p": 0.9}, (0.7, 256)),
    ],
)
def test_generation_settings_are_read_as_lm_eval_does(given: Mapping[str, Any], expected: tuple[float, int]) -> None:
    found = Generation.of(given)
    assert (found.temperature, found.max_tokens) == expected


@pytest.mark.parametrize("given", [{"num_beams": 4}, {"repetition_penalty": 1.1}, {"max_gen_toks": 0}])
def test_a_generation_setting_without_an_effect_is_refused(given: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        Generation.of(given)


def test_the_first_failure_ends_all_requests(engine: ModelEngine) -> None:
    async def fail(ids: Sequence[int], images: Sequence[Any]) -> Any:
        raise DataError("broken")

    engine.score_ranked = fail  # type: ignore[method-assign]
    with pytest.raises(DataError, match="broken"):
        model_over(engine).loglikelihood([request("loglikelihood", "a", "b")] * 9)


@pytest.fixture
def own_tasks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the tasks that come with lm-eval: it reads their 13,000 files for every `TaskManager`."""
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))


def run_tasks(engine: Any, directory: Path, **settings: Any) -> TaskRun:
    config = Config()
    config.eval.lm_eval.tasks = list(NAMES)
    config.eval.lm_eval.include_path = str(task_files(directory / "tasks"))
    config.rollout.max_model_len = engine.max_model_len
    for name, value in settings.items():
        setattr(config.eval.lm_eval, name, value)
    byte_tokenizer().save_pretrained(directory / "model")
    return Tasks(config.eval, config.model, config.rollout, seed=config.seed).evaluate(
        EnginePool([engine]),
        model_path=str(directory / "model"),
        on_stage=lambda name, total: None,
        on_answer=lambda tokens: None,
    )


def expected_results(directory: Path) -> Any:
    """Return the results of lm-eval with its own Hugging Face backend."""
    from lm_eval import simple_evaluate  # type: ignore[import-not-found]

    return simple_evaluate(
        model=hugging_face(max_length=CONTEXT - 2),
        tasks=list(NAMES),
        task_manager=TaskManager(include_path=str(directory / "tasks"), include_defaults=False),
        bootstrap_iters=0,
        fewshot_random_seed=0,
    )


def test_tasks_of_every_output_type_have_the_results_of_the_hugging_face_backend(
    engine: ModelEngine, tmp_path: Path
) -> None:
    run = run_tasks(engine, tmp_path)
    expected = expected_results(tmp_path)
    found = {(metric.task, f"{metric.metric},{metric.filter}"): metric.value for metric in run.metrics}
    wanted = values_by_metric(expected)
    assert found.keys() == wanted.keys()
    assert {task for task, _ in found} == set(NAMES)
    for key, value in wanted.items():
        assert found[key] == pytest.approx(value, rel=1e-4), key
    for task in NAMES:
        for ours, theirs in zip(run.samples[task], expected["samples"][task], strict=True):
            assert ours["arguments"] == theirs["arguments"], "the same prompts"
            assert ours["target"] == theirs["target"]
            for one, other in zip(ours["resps"], theirs["resps"], strict=True):
                assert_same_answers(one, other)


def assert_same_answers(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(other, tuple):
            assert one[0] == pytest.approx(other[0], abs=1e-4)
            assert one[1] == other[1]
        elif isinstance(other, float):
            assert one == pytest.approx(other, abs=1e-3)
        else:
            assert one == other


@pytest.mark.usefixtures("own_tasks_alone")
def test_every_metric_of_the_tasks_has_a_form(engine: ModelEngine, tmp_path: Path) -> None:
    run = run_tasks(engine, tmp_path)
    forms = {f"{metric.task}/{metric.metric}": metric.form for metric in run.metrics}
    assert forms == {
        "lockstep_choice/acc": "mean",
        "lockstep_choice/acc_norm": "mean",
        "lockstep_ending/perplexity": "perplexity",
        "lockstep_ending/acc": "mean",
        "lockstep_sum/exact_match": "mean",
        "lockstep_text/word_perplexity": "perplexity",
        "lockstep_text/byte_perplexity": "perplexity",
        "lockstep_text/bits_per_byte": "bits",
    }


def test_progress_counts_the_requests_of_each_kind(engine: ModelEngine, tmp_path: Path) -> None:
    stages: list[tuple[str, int]] = []
    answers: list[int] = []
    model = model_over(
        engine,
        on_stage=lambda name, total: stages.append((name, total)),
        on_answer=lambda tokens: answers.append(tokens),
    )
    model.loglikelihood([request("loglikelihood", *pair) for pair in PAIRS])
    model.generate_until([request("generate_until", "Once", {"until": [], "max_gen_toks": 3})])
    assert stages == [("scoring", len(PAIRS)), ("sampling", 1)]
    assert answers == [0] * len(PAIRS) + [3]


def test_a_chat_template_writes_the_prompts(engine: ModelEngine, tmp_path: Path) -> None:
    model = model_over(engine)
    model.tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    assert model.apply_chat_template(messages) == "<user>hi<assistant>", "a template without a system role refuses it"


def test_ids_of_a_text_with_its_bos_have_one_bos(engine: ModelEngine) -> None:
    model = model_over(engine)
    calls: list[Mapping[str, Any]] = []
    encode = model.tokenizer.encode
    model.tokenizer = SimpleNamespace(encode=lambda text, **given: calls.append(given) or encode(text, **given))  # type: ignore[assignment]
    for text in ("plain", "<eos>templated"):
        model.tok_encode(text)
    assert calls == [{}, {"add_special_tokens": False}]


@pytest.mark.usefixtures("own_tasks_alone")
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"tasks": ["lockstep_sums"]}, r"has no task lockstep_sums; the nearest are lockstep_sum\b"),
        ({"gen_kwargs": {"max_gen_toks": CONTEXT}}, r"samples up to 128 tokens.*set rollout\.max_model_len=256"),
        ({"gen_kwargs": {"num_beams": 4}}, "lockstep_sum has generation_kwargs of num_beams=4"),
    ],
)
def test_tasks_that_cannot_be_evaluated_are_refused_when_they_are_loaded(
    engine: ModelEngine, tmp_path: Path, settings: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        run_tasks(engine, tmp_path, **{"tasks": ["lockstep_sum"], **settings})
    assert engine.scored == engine.sampled == []
