"""Data, tokenizer, players and manifest of the demo. Its warm start: tests/integration/test_demo_model.py."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL.Image import Image
from rich.console import Console

from lockstep.demo import manifest
from lockstep.demo.architectures import ARCHITECTURES
from lockstep.demo.make import make_demo, make_rows
from lockstep.demo.manifest import ARCHITECTURE_NAMES, MANIFEST, TASK_NAMES, find_made, recipe_hash, write_manifest
from lockstep.demo.play import _sample_turns, demonstrate, sampled_reward, tokenize
from lockstep.demo.tasks import TASKS, answer_text, draw_unique, identity
from lockstep.demo.tokenizer import MARKUP_TOKENS, PAD, TURN_END, VOCAB_SIZE, train_tokenizer, untrained
from lockstep.demo.vision import image_processor, vision_config
from lockstep.demo.warm_start import imitation_loss, new_model
from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.environments.demo.calculator import evaluate
from lockstep.rollout.environments.demo.squares import PATTERNS, draw_picture
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.media.processing import FAMILIES, ImageProcessing
from lockstep.rollout.media.store import ImageStore
from lockstep.rollout.records import EngineCall, FinishReason
from lockstep.trainer.data.split import is_heldout
from tests.fixtures.paths import ROOT


def corpus(task: str, *, noisy: bool = True, count: int = 60):
    rng = random.Random(0)
    rows = draw_unique(TASKS[task].draw, rng, count, heldout=False)
    return rows, demonstrate(TASKS[task], rows, untrained(sees_images=task == "squares"), rng, noisy=noisy)


def tokenizer_for(task: str, episodes):
    return train_tokenizer((episode.text for episode in episodes), sees_images=task == "squares")


def processing_of(tokenizer) -> ImageProcessing:
    vocabulary = tokenizer.get_vocab()
    return ImageProcessing(
        family=FAMILIES["qwen2_5_vl"],
        config=vision_config(vocabulary, vocab_size=len(tokenizer), eos_token_id=0, pad_token_id=0),
        processor=image_processor(),
        vocabulary=vocabulary,
        store=ImageStore(),
    )


@pytest.fixture(scope="module", params=TASK_NAMES)
def demo(request):
    """(task, rows, noisy episodes, tokenizer)"""
    rows, episodes = corpus(request.param)
    return TASKS[request.param], rows, episodes, tokenizer_for(request.param, episodes)


# --- data


@pytest.mark.parametrize("name", TASK_NAMES)
def test_data_depends_on_the_seed_alone(name):
    assert make_rows(TASKS[name], seed=0) == make_rows(TASKS[name], seed=0)
    assert make_rows(TASKS[name], seed=0)["train.jsonl"] != make_rows(TASKS[name], seed=1)["train.jsonl"]


@pytest.mark.parametrize("name", TASK_NAMES)
def test_no_held_out_question_is_trained_whatever_the_seeds(name):
    train = {identity(row) for seed in (0, 1) for row in make_rows(TASKS[name], seed)["train.jsonl"]}
    for seed in (0, 1):
        for file, rows in make_rows(TASKS[name], seed).items():
            if file != "train.jsonl":
                assert not train & {identity(row) for row in rows}, file


def test_one_question_in_eight_is_held_out():
    share = sum(is_heldout(f"compute {number}") for number in range(8000)) / 8000
    assert share == pytest.approx(1 / 8, abs=0.015)


def test_answers_are_right():
    for row in make_rows(TASKS["calculator"], seed=0)["train.jsonl"][:200]:
        assert evaluate(row["question"].removeprefix("compute ")) == int(row["answer"])
    for row in make_rows(TASKS["reverse"], seed=0)["train.jsonl"][:200]:
        assert row["question"].removeprefix("reverse ").split() == row["answer"].split()[::-1]
    files = make_rows(TASKS["chain"], seed=0)
    for file, hops in (("train.jsonl", {1, 2}), ("heldout.jsonl", {1, 2}), ("heldout_harder.jsonl", {3, 4})):
        assert {row["hops"] for row in files[file]} == hops
        for row in files[file][:100]:
            links = {link["key"]: link["value"] for link in row["links"]}
            said = f"go {row['question'].removeprefix('find ')}"
            for _ in range(row["hops"]):
                said = links[said.removeprefix("go ")]
            assert said == f"value {row['answer']}"


def test_a_small_picture_shows_the_square_and_not_its_pattern():
    def seen(image: Image) -> torch.Tensor:
        return image_processor()(images=[image], return_tensors="pt")["pixel_values"]

    level = 1 / 255 / min(image_processor().image_std)
    for left, top, size in ((12, 20, 76), (124, 136, 80)):
        pictures = [draw_picture((left, top, size, "red", pattern)) for pattern in PATTERNS]
        assert all(one != other for one, other in itertools.combinations(pictures, 2))
        small = [seen(picture) for picture in pictures]
        for one, other in itertools.combinations(small, 2):
            assert (one - other).abs().max() <= 4 * level
        assert (small[0] - seen(draw_picture((left, top, size, "blue", "rows")))).abs().max() > 50 * level


def test_a_swapped_picture_says_nothing_about_the_answer():
    files = make_rows(TASKS["squares"], seed=0)
    for row, swapped in zip(files["heldout.jsonl"], files["heldout_swapped.jsonl"], strict=True):
        assert (row["question"], row["answer"]) == (swapped["question"], swapped["answer"])
        assert row["images"] != swapped["images"]
    rows = files["heldout_swapped.jsonl"]
    rng = random.Random(0)
    episodes = demonstrate(TASKS["squares"], rows, untrained(sees_images=True), rng, noisy=False)
    right = [e.last_turn == answer_text(row["answer"]) for e, row in zip(episodes, rows, strict=True)]
    # 36 answers: a player who sees everything is right in 7 rows of 256, with a standard deviation of 2.6.
    assert 0 <= sum(right) <= 18


# --- players


@pytest.mark.parametrize("name", TASK_NAMES)
def test_clean_demonstrations_always_earn_the_reward(name):
    rows, episodes = corpus(name, noisy=False)
    assert all(episode.done for episode in episodes)
    assert [episode.last_turn for episode in episodes] == [answer_text(row["answer"]) for row in rows]


@pytest.mark.parametrize("name", TASK_NAMES)
def test_noisy_demonstrations_are_right_some_of_the_time(name):
    rows, episodes = corpus(name, count=600)
    right = [e.last_turn == answer_text(row["answer"]) for e, row in zip(episodes, rows, strict=True)]
    assert 0.2 < sum(right) / len(right) < 0.5


def test_a_broken_call_is_answered_and_repaired():
    _, episodes = corpus("calculator", count=400)
    repaired = [episode for episode in episodes if "could not be read" in episode.text]
    assert repaired
    assert all(len(episode.spans) == 3 for episode in repaired)


# --- tokenizer


def test_the_tokenizer_is_small_and_deterministic(demo):
    task, _, episodes, tokenizer = demo
    again = tokenizer_for(task.name, episodes)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert len(tokenizer) <= VOCAB_SIZE
    assert (tokenizer.eos_token, tokenizer.pad_token) == (TURN_END, PAD)


def test_markup_is_one_token_and_only_chatml_is_special(demo):
    tokenizer = demo[3]
    for token in (*MARKUP_TOKENS, TURN_END, PAD, "<|im_start|>"):
        assert len(tokenizer(token).input_ids) == 1
    text = "<tool_call>{}</tool_call>" + TURN_END
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == "<tool_call>{}</tool_call>"


def test_text_that_a_model_must_copy_is_never_merged(demo):
    tokenizer = demo[3]
    for text in ("compute 64*22-55", "find c42", "reverse 3 1 4 1", "go e17", "The answer is -35"):
        pieces = [tokenizer.decode([token]) for token in tokenizer(text).input_ids]
        for piece in pieces:
            assert len(piece) == 1 or not any(char in "0123456789*" for char in piece), pieces
    assert "c" in [tokenizer.decode([token]) for token in tokenizer("find c42").input_ids]


def test_a_tool_call_costs_few_tokens():
    for name, limit in (("calculator", 16), ("chain", 11)):
        _, episodes = corpus(name, noisy=False)
        tokenizer = train_tokenizer(episode.text for episode in corpus(name)[1])
        start, end = episodes[0].spans[0]
        assert len(tokenizer(episodes[0].text[start:end]).input_ids) <= limit


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60))
def test_any_text_survives_the_tokenizer(text):
    tokenizer = _CALCULATOR_TOKENIZER
    assert tokenizer.decode(tokenizer(text).input_ids) == text


_CALCULATOR_TOKENIZER = train_tokenizer(episode.text for episode in corpus("calculator")[1])


def test_demonstrations_have_the_tokens_that_rollouts_have(demo):
    """Prompts, sampled turns and glue, tokenized piece by piece by `Chat`, equal the whole tokenized at once."""
    task, rows, episodes, tokenizer = demo
    chat = Chat(tokenizer, images=processing_of(tokenizer) if task.draw_image else None)
    for row, episode in zip(rows, episodes, strict=True):
        environment = episode.environment
        learned = tokenize(episode, tokenizer)
        ids: list[int] = []
        is_learned: list[bool] = []
        messages: list[Any] = [{"role": "user", "content": row["question"]}]
        images = iter(episode.images)
        if task.draw_image:
            asked = {"type": "text", "text": row["question"]}
            messages = [{"role": "user", "content": [{"type": "image", "image": next(images)}, asked]}]
        prompt = chat.prompt(messages, environment.tools)
        for number, (start, end) in enumerate(episode.spans):
            sampled = tokenizer(episode.text[start:end], add_special_tokens=False).input_ids
            is_learned += [False] * (len(prompt) - len(ids)) + [True] * len(sampled)
            ids = [*prompt, *sampled]
            if number + 1 == len(episode.spans):
                break
            call = EngineCall(
                prompt_ids=tuple(prompt),
                sampled_ids=tuple(sampled),
                sampled_logprobs=(-1.0,) * len(sampled),
                finish_reason=FinishReason.STOP,
                images=tuple(prompt.images),
            )
            messages.append(dict(chat.parse(sampled, environment.tools)))
            reply = episode.text[end : episode.spans[number + 1][0]]
            content = reply.partition("<tool_response>\n")[2].partition("\n</tool_response>")[0]
            if "<|vision_start|>" in content:
                content = [{"type": "image", "image": next(images)}]
            answer = [{"role": "tool", "name": "t", "content": content}]
            extended = chat.extend(call, messages, answer, environment.tools)
            assert extended is not None, "the demo's template must allow extension, or every turn would branch"
            messages += answer
            prompt = extended
        assert learned.ids == ids
        assert learned.is_learned == is_learned


def test_the_template_renders_reasoning_parallel_calls_and_system_turns():
    conversation: Any = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": "so",
            "reasoning_content": "hm",
            "tool_calls": [
                {"function": {"name": "f", "arguments": {"x": 1}}},
                {"function": {"name": "g", "arguments": '{"y": 2}'}},
            ],
        },
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    text = _CALCULATOR_TOKENIZER.apply_chat_template(
        conversation,
        tools=[{"function": {"name": "f", "parameters": {"properties": {"x": {}, "z": {}}}}}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert text == (
        "<|im_start|>system\nbe brief\nTools: f(x, z)<|im_end|>\n<|im_start|>user\nq<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\nso\n"
        '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {"y": 2}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


# --- model


def test_the_model_is_small_tied_and_deterministic():
    model, again = (new_model(_CALCULATOR_TOKENIZER, seed=3) for _ in range(2))
    assert 0.5e6 < model.num_parameters() < 0.7e6
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype is torch.float32
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert model.generation_config.eos_token_id == _CALCULATOR_TOKENIZER.eos_token_id


def test_the_names_of_architectures_are_those_of_their_configs():
    assert tuple(ARCHITECTURES) == ARCHITECTURE_NAMES
    for name in ARCHITECTURES:
        assert new_model(_CALCULATOR_TOKENIZER, seed=0, architecture=name).config.model_type == name
    assert recipe_hash("calculator", 0, "qwen3_moe") != recipe_hash("calculator", 0)


def test_only_assistant_tokens_are_learned():
    _, episodes = corpus("calculator", count=4)
    model = new_model(_CALCULATOR_TOKENIZER, seed=0)
    demonstrations = [tokenize(episode, _CALCULATOR_TOKENIZER) for episode in episodes]
    losses = []
    for item in demonstrations:  # one at a time, without padding, straight from the definition
        logprobs = model(input_ids=torch.tensor([item.ids])).logits[0].log_softmax(-1)
        losses += [-logprobs[i - 1, item.ids[i]] for i in range(1, len(item.ids)) if item.is_learned[i]]
    assert imitation_loss(model, demonstrations).item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)


def test_the_sampler_follows_the_seed_and_greedy_equals_transformers_generate():
    model = new_model(_CALCULATOR_TOKENIZER, seed=0).eval()
    rows, _ = corpus("calculator", count=3)
    task = TASKS["calculator"]
    rewards = [sampled_reward(model, _CALCULATOR_TOKENIZER, task, rows, seed=seed) for seed in (0, 0)]
    assert rewards[0] == rewards[1] == 0.0  # an untrained model earns nothing

    texts = ["<|im_start|>user\ncompute 1<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>assistant\n"]
    turns = _sample_turns(model, _CALCULATOR_TOKENIZER, texts, torch.Generator(), greedy=True)
    for text, turn in zip(texts, turns, strict=True):
        ids = _CALCULATOR_TOKENIZER(text, return_tensors="pt").input_ids
        generated = model.generate(ids, max_new_tokens=48, do_sample=False)[0, ids.shape[1] :]  # type: ignore[operator]
        assert turn == str(_CALCULATOR_TOKENIZER.decode(generated)).split(TURN_END)[0]


def test_a_model_with_images_samples_what_transformers_generates_and_learns_from_their_pixels():
    _, episodes = corpus("squares", count=3, noisy=False)
    tokenizer = tokenizer_for("squares", corpus("squares")[1])
    model = new_model(tokenizer, seed=0, sees_images=True).eval()
    assert model.config.model_type == "qwen2_5_vl"
    assert 0.5e6 < model.num_parameters() < 1e6

    texts = [episode.text[:start] for episode, start in zip(episodes, (e.spans[1][0] for e in episodes), strict=True)]
    images = [image for episode in episodes for image in episode.images]
    turns = _sample_turns(model, tokenizer, texts, torch.Generator(), greedy=True, images=images)
    for text, turn, episode in zip(texts, turns, episodes, strict=True):
        ids = tokenizer(text, return_tensors="pt").input_ids
        pixels = image_processor()(images=episode.images, return_tensors="pt")
        is_image = (ids == model.config.image_token_id).int()
        generated = model.generate(  # type: ignore[operator]
            ids, **pixels, mm_token_type_ids=is_image, max_new_tokens=48, do_sample=False
        )[0, ids.shape[1] :]
        assert turn == str(tokenizer.decode(generated)).split(TURN_END)[0]

    demonstrations = [tokenize(episode, tokenizer) for episode in episodes]
    swapped = [replace(item, images=tuple(reversed(item.images))) for item in demonstrations]
    assert imitation_loss(model, demonstrations).item() != imitation_loss(model, swapped).item()


def test_a_task_with_images_has_its_own_architecture(tmp_path):
    with pytest.raises(ConfigError, match="leave --architecture out"):
        make_demo("squares", tmp_path / "model", tmp_path / "data", 0, Console(), "falcon_h1")


# --- cache


def made(tmp_path, task="calculator", seed=0):
    model, data = tmp_path / "model", tmp_path / "data"
    for directory, name in ((model, "config.json"), (data, "train.jsonl")):
        directory.mkdir()
        (directory / name).write_text("{}")
    (data / "images").mkdir()
    (data / "images/0.png").write_bytes(b"picture")
    info = {"task": task, "sampled_reward": 0.2, "greedy_heldout_reward": 0.0, "num_parameters": 5, "vocab_size": 3}
    write_manifest(
        model,
        recipe_hash(task, seed),
        info=info,
        model=[model / "config.json"],
        data_dir=data,
        data=["train.jsonl", "images/0.png"],
    )
    return model, data


def test_a_made_demo_is_found_and_described(tmp_path):
    model, data = made(tmp_path)
    info = find_made("calculator", model, data, 0)
    assert info is not None
    assert info.is_cached
    assert (info.sampled_reward, info.model_dir, info.data_dir) == (0.2, model, data)


def test_another_task_seed_recipe_or_file_makes_it_again(tmp_path, monkeypatch):
    model, data = made(tmp_path)
    assert find_made("chain", model, data, 0) is None
    assert find_made("calculator", model, data, 1) is None
    assert find_made("calculator", model, tmp_path / "elsewhere", 0) is None
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "_RECIPE_SOURCES", manifest._RECIPE_SOURCES[:-1])
        assert find_made("calculator", model, data, 0) is None
    assert find_made("calculator", model, data, 0) is not None
    (data / "images/0.png").write_bytes(b"another")
    assert find_made("calculator", model, data, 0) is None
    (data / "images/0.png").write_bytes(b"picture")
    assert find_made("calculator", model, data, 0) is not None
    (data / "train.jsonl").write_text("[]")
    assert find_made("calculator", model, data, 0) is None
    (model / MANIFEST).write_text("{ torn")
    assert find_made("calculator", model, data, 0) is None


def test_the_recipe_is_the_code_without_comments_and_docstrings(tmp_path, monkeypatch):
    for name in manifest._RECIPE_SOURCES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    monkeypatch.setattr(manifest, "_ROOT", tmp_path)
    before, file = recipe_hash("chain", 0), tmp_path / "demo/warm_start.py"
    text = file.read_text()
    file.write_text(text.replace('"""Make a model', '"""Other words') + "# a comment\n")
    assert '"""Other words' in file.read_text()
    assert recipe_hash("chain", 0) == before
    file.write_text(text.replace("noisy_steps: int = 60", "noisy_steps: int = 61"))
    assert recipe_hash("chain", 0) != before


def test_a_directory_with_other_files_is_never_overwritten(tmp_path):
    (tmp_path / "thesis.txt").write_text("four years")
    with pytest.raises(ConfigError, match="choose another --out"):
        find_made("calculator", tmp_path, tmp_path, 0)


def test_the_manifest_knows_all_tasks():
    assert tuple(TASKS) == TASK_NAMES


def test_looking_for_a_made_demo_imports_nothing_heavy():
    code = (
        "import sys, lockstep.demo.manifest; print([m for m in ('torch', 'transformers', 'rich') if m in sys.modules])"
    )
    assert json.loads(subprocess.check_output([sys.executable, "-c", code], text=True)) == []
