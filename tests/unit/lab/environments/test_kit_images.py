"""Examination of environments whose rows and tools show images."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from lockstep.demo.tokenizer import VISION_TEMPLATE
from lockstep.integrations.tool_servers.tool_server import close_servers
from lockstep.lab.environments.journal import Journal
from lockstep.lab.environments.kit import findings
from lockstep.lab.environments.scripted_engine import CannotScore, RecordingEngine
from lockstep.lab.environments.subject import Options
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.errors import EvidenceError
from lockstep.rollout.records import EngineCall, ImageSpan
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.config.schema import Config
from lockstep.trainer.tools.dry_run import sampled_answer
from tests.fixtures.vision import picture, save_tiny
from tests.unit.lab.environments.conftest import failed

TOOL = """
from PIL import Image


def look(side: int):
    '''Show a picture.

    Args:
        side: of it
    '''
    return Image.new("RGB", (56, 56), (9 * side, 0, 0))
"""


SERVER = """
import io

from mcp.server.mcpserver import Image, MCPServer
from PIL import Image as Picture

server = MCPServer("pictures")


@server.tool(structured_output=False)
def look(side: int) -> Image:
    file = io.BytesIO()
    Picture.new("RGB", (56, 56), (9 * side, 0, 0)).save(file, format="PNG")
    return Image(data=file.getvalue(), format="png")


server.run("stdio")
"""


class Sees(CannotScore):
    """Engine that answers with the digest of the last image."""

    max_model_len = 2048
    loop: BackgroundLoop

    def __init__(self, encode: Any) -> None:
        self._encode = encode

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[ImageSpan] = ()
    ) -> EngineCall:
        return await sampled_answer(self._encode(images[-1].digest[:4]), prompt_ids, sampling, images)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Directory of a model, of rows that differ only by picture and answer, and of a tool."""
    directory = tmp_path_factory.mktemp("images")
    save_tiny("qwen2_5_vl", directory / "model")
    (directory / "model/chat_template.jinja").write_text(VISION_TEMPLATE)  # which lists tools
    rows = []
    for number in range(3):
        picture(number, 56, 56).save(directory / f"{number}.png")
        rows.append({"prompt": "Which?", "image": f"{number}.png", "answer": str(70 + number)})
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "tool.py").write_text(TOOL)
    (directory / "server.py").write_text(SERVER)
    yield directory
    close_servers()


@pytest.mark.parametrize(
    ("environment", "settings"),
    [
        ("tools", {"files": ["{directory}/tool.py:look"]}),
        pytest.param(
            "mcp",
            {
                "servers": {"own": {"command": sys.executable, "args": ["{directory}/server.py"]}},
                "start_timeout_s": 300.0,
                "tool_timeout_s": 300.0,
            },
            marks=[pytest.mark.long, pytest.mark.timeout(600)],
        ),
    ],
)
def test_rows_that_differ_by_their_images_and_a_tool_that_shows_one_pass(
    directory: Path, environment: str, settings: dict[str, Any]
) -> None:
    config = Config()
    config.model.path, config.model.images.max_per_prompt = str(directory / "model"), 3
    config.data.path, config.data.heldout_path = str(directory / "rows.jsonl"), None
    config.environment.name, config.environment.max_turns = environment, 3
    config.environment.settings = json.loads(json.dumps(settings).replace("{directory}", str(directory)))
    config.reward.functions, config.reward.isolation = ["exact_match"], "thread"
    config.rollout.max_tokens_per_turn, config.rollout.max_model_len = 128, 2048
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)

    @contextmanager
    def opened(config: Config, images: object) -> Iterator[Any]:
        with BackgroundLoop() as loop:
            engine = Sees(lambda text: tokenizer.encode(text, add_special_tokens=False))
            engine.loop = loop
            yield engine

    options = Options(rows=3, samples=2, deadline_s=300.0)
    found = {one.check: one for one in findings(config, options, Journal(), open_engine=opened)}
    assert failed(found) == set(), found
    assert found["tool look"].measured.startswith("[image")
    assert found["same seed, same episode"].measured == "6 of 6 episodes are the same twice"
    assert found["prompts differ between rows"].measured == "3 prompts for 3 rows"


async def test_a_recording_tells_images_apart() -> None:
    one, other = (ImageSpan(start=1, end=3, digest=digest * 64) for digest in "ab")
    recorder = RecordingEngine(Sees(lambda text: [ord(text[0])]))  # type: ignore[arg-type]
    sampling = Sampling(max_tokens=4, seed=7)
    for image in (one, other):
        await recorder.generate([1, 5, 5, 2], sampling, [image])
    engine = recorder.replay()
    assert (await engine.generate([1, 5, 5, 2], sampling, [one])).sampled_ids == (ord("a"),)
    assert (await engine.generate([1, 5, 5, 2], sampling, [other])).sampled_ids == (ord("b"),)
    with pytest.raises(EvidenceError, match="another prompt"):
        await engine.generate([1, 5, 5, 2], sampling)
