"""Checks of server addresses before anything starts, and the command that starts a server."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.utils.argparse_utils import FlexibleArgumentParser

from lockstep.rollout.engine.arguments import KEEP_FREED, MALLOC, engine_variables
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.server.server_engine import ServerEngine
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.checks.declared import value_problems
from lockstep.trainer.checks.engines import engine_problems
from lockstep.trainer.config.schema import Config
from lockstep.trainer.distributed.distributed import choose_interface
from lockstep.trainer.engines.servers import Connector, check_quantization, engine_key
from lockstep.trainer.engines.start import check_cores, check_engine, engine_settings, start_engine
from lockstep.trainer.tools.serve_engine import check_host, command, environment, shell_line
from tests.fixtures.broken_models import change_config
from tests.fixtures.fake_server import KEY, SERVER_INFO, FakeServer
from tests.fixtures.models import save_tiny_model
from tests.fixtures.paths import ROOT

try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:  # vLLM 0.33
    from vllm.entrypoints.common.cli_args import make_arg_parser  # type: ignore[import-not-found, no-redef]

URL = "http://10.0.0.7:8000"


def config(*urls: str, engine: str = "server", **changes: Any) -> Config:
    made = Config()
    made.rollout.engine, made.rollout.urls = engine, list(urls)
    for name, value in changes.items():
        section, _, field = name.partition("__")
        setattr(getattr(made, section), field, value)
    return made


def problems_of(made: Config) -> list[str]:
    return list(engine_problems(made.rollout, made.sync, made.server, correction_mode=made.correction.mode))


def settings_of(made: Config) -> EngineSettings:
    return engine_settings(made.model, made.rollout, made.correction, seed=made.seed, context=made.engine_context)


def command_of(made: Config) -> list[str]:
    return command(settings_of(made), made.server, has_key=made.rollout.api_key_env is not None)


def line_of(made: Config) -> str:
    return shell_line(command_of(made), environment(settings_of(made)), key_env=made.rollout.api_key_env)


def connect(made: Config, loop: BackgroundLoop) -> list[ServerEngine]:
    needs_routes = made.plan.replays_engine
    connector = Connector(made.model, made.rollout, context=made.engine_context, needs_routes=needs_routes, loop=loop)
    return connector.connect_all()


def test_valid_settings_have_no_problems():
    assert problems_of(Config()) == []
    assert problems_of(config(URL, "https://engine-2:8443/")) == []
    assert problems_of(config("http://[::1]:8000", sync__address="127.0.0.1")) == []
    awake = config(engine="colocated", rollout__max_staleness=1, rollout__sleep_level=0)
    assert problems_of(awake) == []


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (config(), "set rollout.urls=[http://127.0.0.1:8000]"),
        (config(URL, engine="embedded"), "set rollout.engine=server, or rollout.urls=[]"),
        (config(URL, engine="colocated"), "found rollout.engine=colocated; set rollout.engine=server"),
        (config(engine="colocated", rollout__max_staleness=1), "set rollout.sleep_level=0, or rollout.max_staleness=0"),
        (config(URL, rollout__drivers=2), "rollout.urls has 1; set rollout.drivers=1 or less"),
        (config("10.0.0.7:8000"), "is neither an address nor a file"),
        (config("x" * 300), "is neither an address nor a file"),
        (config("http://10.0.0.7"), "has no port"),
        (config("http://10.0.0.7:http"), "cannot be read"),
        (config("http://10.0.0.7:8000/v1"), "has more than host and port"),
        (config("http://me:secret@10.0.0.7:8000"), "keys belong in the environment"),
        (config(URL, URL), "twice"),
        (config(URL, f"{URL}/"), "twice"),
        (config(URL, sync__address="127.0.0.1"), "set sync.address=null"),
        (config(engine="embedded", sync__address="10.0.0.1"), "set sync.address=null"),
        (config(URL, server__host="0.0.0.0", rollout__api_key_env=None), "server.host=127.0.0.1"),
    ],
)
def test_a_contradiction_names_the_override(made: Config, expected: str):
    (problem,) = problems_of(made)
    assert expected in problem


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LOCKSTEP_ENGINE_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"export LOCKSTEP_ENGINE_KEY=.*rollout\.api_key_env=null"):
        engine_key("LOCKSTEP_ENGINE_KEY")
    monkeypatch.setenv("LOCKSTEP_ENGINE_KEY", "k")
    assert engine_key("LOCKSTEP_ENGINE_KEY") == "k"
    assert engine_key(None) is None


@pytest.mark.parametrize("key", ["secret\n", " secret", "sec\r\nret", "s\u00e9cret", "\udcff"])
def test_a_key_that_no_header_carries_is_refused_without_showing_it(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_ENGINE_KEY", key)
    with pytest.raises(ConfigError, match="HTTP headers cannot carry") as refused:
        engine_key("LOCKSTEP_ENGINE_KEY")
    assert "secret" not in str(refused.value)


def test_a_server_is_started_on_loopback_and_guarded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCKSTEP_ENGINE_KEY", "do-not-show-this")
    words = command_of(config())
    assert words[words.index("--host") + 1] == "127.0.0.1"
    middleware = [words[index + 1] for index, word in enumerate(words) if word == "--middleware"]
    assert middleware == [
        "lockstep.rollout.server.generate_route.CompactGenerate",
        "lockstep.rollout.server.guard.RequireKey",
    ]
    assert words[words.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert "--no-enable-chunked-prefill" in words
    line = line_of(config())
    assert "VLLM_SERVER_DEV_MODE=1" in line
    assert "VLLM_API_KEY=$LOCKSTEP_ENGINE_KEY" in line
    assert "do-not-show-this" not in line
    assert "lockstep.rollout.server.guard.RequireKey" not in command_of(config(rollout__api_key_env=None))


@pytest.mark.parametrize("words", [["--hf-token", "hunter2"], ["--hf-token=hunter2"], ["--api-key", "hunter2"]])
def test_the_printed_command_of_a_server_has_no_key(words: list[str]):
    made = config()
    made.server.vllm_args = ["--tensor-parallel-size", "2", *words]
    assert "hunter2" not in line_of(made)
    assert "--tensor-parallel-size 2" in line_of(made)
    assert command_of(made)[-len(words) :] == words


def test_vllm_parses_the_command_of_a_server_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    made = config(rollout__max_model_len=4096)
    made.model.dtype = "bfloat16"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    words = command_of(made)
    monkeypatch.undo()
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(words[words.index("--model") :])
    assert parsed.hf_overrides == {"head_dtype": "float32"}
    assert parsed.enable_chunked_prefill is None, "vLLM's own choice"
    assert parsed.kv_cache_memory_bytes is None
    assert parsed.enforce_eager is False
    assert parsed.weight_transfer_config.backend == "nccl"
    words = command_of(config(rollout__kv_cache_gib=2))
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(words[words.index("--model") :])
    assert parsed.enable_chunked_prefill is False
    assert parsed.kv_cache_memory_bytes == 2 * 2**30


def test_a_host_that_resolves_to_loopback_unintentionally_is_refused(monkeypatch: pytest.MonkeyPatch):
    for host in ("127.0.0.1", "localhost", "0.0.0.0"):
        check_host(host)
    with pytest.raises(ConfigError, match=r"server\.host=127\.0\.1\.1 is loopback .*`ip -4 addr`"):
        check_host("127.0.1.1")  # Debian writes it into /etc/hosts, and `hostname -i` prints it
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 2, 17, "", ("127.0.1.1", 9))])
    with pytest.raises(ConfigError, match=r"server\.host=node-3 is loopback"):
        check_host("node-3")
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"is not an address of this machine"):
        check_host("127.0.1.1 10.0.0.3")  # `hostname -i` on a machine with several


def test_gloo_takes_the_interface_that_reaches_rank_0(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lockstep.trainer.distributed.distributed.address_towards", lambda host: "10.0.0.12")
    monkeypatch.setattr("lockstep.trainer.distributed.distributed.interface_of", {"10.0.0.12": "ib0"}.get)
    several = {"MASTER_ADDR": "node-0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    choose_interface(several)
    assert several["GLOO_SOCKET_IFNAME"] == "ib0"
    for given in ({}, {"MASTER_ADDR": "127.0.0.1"}, {**several, "GLOO_SOCKET_IFNAME": "eth3"}):
        environment = dict(given)
        choose_interface(environment)
        assert environment == given


def test_a_loopback_address_of_rank_0_is_refused_with_several_machines(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("lockstep.trainer.distributed.distributed.address_towards", lambda host: "127.0.1.1")
    several = {"MASTER_ADDR": "node-0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    with pytest.raises(ConfigError, match=r"--main_process_ip node-0 is loopback on this machine \(127\.0\.1\.1\)"):
        choose_interface(several)
    choose_interface({**several, "WORLD_SIZE": "8"})


def test_several_engines_that_would_share_a_core_or_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 5})
    check_cores(2)
    (problem,) = value_problems(config(engine="embedded", rollout__num_engines=0))
    assert "set rollout.num_engines=1" in problem
    with pytest.raises(ConfigError, match=r"num_engines=3 .* this process has 2; set rollout\.num_engines=2 or less"):
        check_cores(3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="or rollout=colocated for an engine on every GPU"):
        check_cores(2)


def test_engines_that_get_weights_over_gloo_keep_memory_unless_users_tune_malloc(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    over_gloo = EngineSettings(model="m", dtype="float32")
    assert engine_variables(over_gloo, is_cpu=True) == {
        "GLIBC_TUNABLES": "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776"
    }
    assert engine_variables(replace(over_gloo, weight_transfer_backend="nccl"), is_cpu=False) == {}
    assert f"{MALLOC}={KEEP_FREED}" in line_of(config())
    assert f"`{MALLOC}={KEEP_FREED}`" in (ROOT / "docs" / "engines.md").read_text()
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    assert engine_variables(over_gloo, is_cpu=True) == {}


def test_a_server_compiles_its_model_when_asked():
    eager, compiled = config(), config(rollout__compile_engine=True)
    assert "--enforce-eager" in command_of(eager)
    assert "--enforce-eager" not in command_of(compiled)
    assert "TORCHDYNAMO_DISABLE=1" in line_of(eager)
    assert "TORCHDYNAMO_DISABLE=0" in line_of(compiled)


def test_a_server_for_adapters_and_a_run_that_sends_whole_weights_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LOCKSTEP_ENGINE_KEY", KEY)
    made = config(rollout__max_model_len=64)
    made.model.path = str(save_tiny_model(tmp_path, tied=True))
    server = FakeServer()

    def connected() -> bool:
        (engine,) = connect(made, loop)
        loop.run(engine.close())
        return engine.takes_adapters

    with BackgroundLoop() as loop:
        context = server.running()
        loop.run(context.__aenter__())
        try:
            made.rollout.urls = [server.url]
            assert not connected()
            made.model.lora.rank = 16
            assert not connected(), "merged, for a server without adapters"
            made.model.lora.send = "adapter"
            with pytest.raises(ConfigError, match=r"restart it with `lockstep serve-engine model\.lora\.rank=16`"):
                connected()
            server.info = {"vllm_config": {**SERVER_INFO["vllm_config"], "lora_config": {"max_lora_rank": 8}}}
            with pytest.raises(ConfigError, match=r"up to rank 8, .* restart it with --max-lora-rank 16"):
                connected()
            made.model.lora.rank = 8
            assert connected()
            made.model.lora.send = "merged"
            with pytest.raises(ConfigError, match="was started for adapters, and this run sends whole weights"):
                connected()
            made.model.lora.rank, made.model.adapters = 0, {"last": "runs/a"}
            assert connected(), "evaluation and gateways only name adapters"
            server.info = SERVER_INFO
            with pytest.raises(ConfigError, match=r"no adapters; .*serve-engine 'model.adapters={last: runs/a}'"):
                connected()
        finally:
            loop.run(context.__aexit__(None, None, None))


@pytest.mark.parametrize(
    ("of_server", "of_run", "stored", "message"),
    [
        (None, None, None, None),
        ("fp8_per_block", "fp8_per_block", None, None),
        ("gpt_oss_mxfp4", None, "mxfp4", None),
        (None, "fp8_per_block", None, r"has rollout\.quantization=fp8_per_block; .* set rollout\.quantization=null$"),
        ("fp8_per_block", None, None, r"or set rollout\.quantization=fp8_per_block$"),
        (None, None, "mxfp4", r"quantization=null, and this run has quantized weights \(mxfp4\); .*serve-engine`$"),
    ],
)
def test_a_server_must_quantize_as_the_run_says(
    of_server: str | None, of_run: str | None, stored: str | None, message: str | None
) -> None:
    engine: Any = SimpleNamespace(name="the engine", quantization=of_server)
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        check_quantization(engine, of_run, stored=stored)


def test_an_adapter_to_train_further_is_not_sampled_with(tmp_path: Path) -> None:
    made = config(engine="embedded")
    made.model.lora.rank, made.model.lora.path = 16, "runs/a"
    with (
        BackgroundLoop() as loop,
        pytest.raises(ConfigError, match=r"set 'model\.adapters={trained: runs/a}' without model\.lora\.path"),
    ):
        start_engine(made, loop=loop, log_path=tmp_path / "engine.log")


def test_settings_without_an_engine_are_found_without_starting_one(tmp_path: Path) -> None:
    made = config(engine="embedded")
    made.model.path = str(save_tiny_model(tmp_path, tied=True))
    made.model.lora.rank = 8
    check_engine(settings_of(made))
    for changes, message in (
        ({"quantization": "fp8_per_block"}, "on a CPU vLLM quantizes bfloat16"),
        ({"batch_invariant": True}, "for GPUs only"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_engine(settings_of(replace(made, rollout=replace(made.rollout, **changes))))
    made.rollout.compile_engine, made.model.lora.send = True, "adapter"
    with pytest.raises(ConfigError, match=r"no adapters in compiled models; set rollout\.compile_engine=false"):
        check_engine(settings_of(made))


def test_the_command_of_a_server_names_its_adapters(tmp_path: Path) -> None:
    made = config()
    made.model.path = str(save_tiny_model(tmp_path, tied=True))
    made.model.lora.rank = 12
    arguments = " ".join(command_of(made))
    assert "--enable-lora --max-lora-rank 16 --max-loras 1 --max-cpu-loras 1" in arguments
    assert "--lora-modules policy=lockstep:policy" in arguments
    made.model.lora.send = "merged"
    assert "lora" not in " ".join(command_of(made))
    made.model.lora.rank, made.model.lora.send = 600, "adapter"
    with pytest.raises(ConfigError, match=r"up to rank 512, found 600; set model\.lora\.send=merged"):
        command_of(made)


def test_quantization_and_batch_invariance_are_refused_where_vllm_has_no_kernels(tmp_path: Path) -> None:
    made = config(rollout__quantization="fp8_per_block")
    made.model.path = str(save_tiny_model(tmp_path, tied=True))
    with pytest.raises(ConfigError, match=r"set rollout\.quantization=fp8_per_channel model\.dtype=bfloat16"):
        command_of(made)
    made.rollout.quantization, made.model.dtype = "fp8_per_channel", "bfloat16"
    assert "--quantization fp8_per_channel" in " ".join(command_of(made))
    made.rollout.batch_invariant = True
    with pytest.raises(ConfigError, match="for GPUs only"):
        line_of(made)


@pytest.mark.parametrize(("source", "expected", "fitting"), [("model", 65, 64), ("policy", 65, 63)])
def test_a_server_whose_context_is_too_short_is_refused(
    source: str, expected: int, fitting: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As the teacher it scores whole rows, for which it needs one token more."""
    monkeypatch.setenv("LOCKSTEP_ENGINE_KEY", KEY)
    made = config(rollout__max_model_len=expected - (source == "policy"), teacher__source=source)
    made.model.path = str(save_tiny_model(tmp_path, tied=True))
    server = FakeServer()
    with BackgroundLoop() as loop:
        context = server.running()
        loop.run(context.__aenter__())
        try:
            made.rollout.urls = [server.url]
            with pytest.raises(ConfigError) as error:
                connect(made, loop)
            made.rollout.max_model_len = fitting
            (engine,) = connect(made, loop)
            loop.run(engine.close())
        finally:
            loop.run(context.__aexit__(None, None, None))
    assert f"has a context of 64 tokens, expected {expected}; restart it with --max-model-len 65" in str(error.value)
    assert str(error.value).endswith(f"or set rollout.max_model_len={fitting}")


def test_one_process_behind_two_addresses_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Weights would be sent to it twice at once."""
    with listed_servers(monkeypatch, tmp_path) as (made, server, loop):
        made.rollout.urls = [server.url, server.url.replace("127.0.0.1", "localhost")]
        with pytest.raises(ConfigError, match=r"localhost:\d+ and .*127\.0\.0\.1:\d+ are one process; name it once"):
            connect(made, loop)


def test_a_run_starts_with_the_servers_of_a_file_that_are_ready(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with listed_servers(monkeypatch, tmp_path) as (made, server, loop):
        made.rollout.start_timeout_s = 4.0
        path = tmp_path / "servers.txt"
        path.write_text(f"http://127.0.0.1:1\n{server.url}\n")
        made.rollout.urls = [str(path)]
        (engine,) = connect(made, loop)
        assert engine.name.endswith(server.url)
        loop.run(engine.close())


@contextmanager
def listed_servers(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> Iterator[tuple[Config, FakeServer, BackgroundLoop]]:
    """Yield the settings of a run with a tiny model, a server that runs, and the loop of its connections."""
    monkeypatch.setenv("LOCKSTEP_ENGINE_KEY", KEY)
    made = config(rollout__max_model_len=64)
    made.model.path = str(save_tiny_model(folder / "model", tied=True))
    server = FakeServer()
    with BackgroundLoop() as loop:
        context = server.running()
        loop.run(context.__aenter__())
        try:
            yield made, server, loop
        finally:
            loop.run(context.__aexit__(None, None, None))


def test_a_server_with_the_other_factors_of_longrope_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LOCKSTEP_ENGINE_KEY", KEY)
    made = config(rollout__max_model_len=48)
    made.model.path = str(save_tiny_model(tmp_path, tied=True))
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 56}
    change_config(tmp_path, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors})
    server = FakeServer()
    with BackgroundLoop() as loop:
        context = server.running()
        loop.run(context.__aenter__())
        try:
            made.rollout.urls = [server.url]
            with pytest.raises(ConfigError, match=r"context of 64 tokens.*long factors.*--max-model-len 48"):
                connect(made, loop)
        finally:
            loop.run(context.__aexit__(None, None, None))


def test_a_quantized_engine_needs_a_correction_per_token() -> None:
    assert problems_of(config(engine="embedded", rollout__quantization="fp8_per_channel")) == []
    for mode in ("off", "none", "sequence_truncate"):
        made = config(engine="embedded", rollout__quantization="fp8_per_channel", correction__mode=mode)
        (problem,) = problems_of(made)
        assert f"which correction.mode={mode} does not correct per token; set correction=token_truncate" in problem


def test_a_server_without_routes_is_refused_if_they_are_replayed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LOCKSTEP_ENGINE_KEY", KEY)
    made = config(rollout__max_model_len=64, correction__routing_replay="engine")
    made.model.path = str(save_tiny_model(tmp_path, tied=True))
    server, running = FakeServer(), {"enable_return_routed_experts": True}
    with BackgroundLoop() as loop:
        context = server.running()
        loop.run(context.__aenter__())
        try:
            made.rollout.urls = [server.url]
            with pytest.raises(ConfigError, match="restart it with --enable-return-routed-experts"):
                connect(made, loop)
            server.info = {"vllm_config": {**SERVER_INFO["vllm_config"], "aux_output_config": running}}
            (engine,) = connect(made, loop)
            loop.run(engine.close())
        finally:
            loop.run(context.__aexit__(None, None, None))
    assert "--enable-return-routed-experts" in command_of(made)
    assert "--enable-return-routed-experts" not in command_of(config())
