"""README and docs name settings, presets, files and commands that exist; the site builds without a warning."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.lab.reward_model.config import RewardModelConfig
from lockstep.rollout.records import Rollout
from lockstep.trainer.config.schema import Config
from tests.fixtures.pages import PAGES, ROOT, bash_blocks, commands_outside_of_blocks
from tests.integration.test_page_commands import PLANNED, RUN

FOREIGN = {
    "first-hour.md": r"algorithm\.clip_hgh|model\.load_in_",
    "migrating.md": r"data\.train_batch_size|reward_model|algorithm\.(adv_estimator|norm_adv|use_kl|lam$|rollout_|fil)",
}
"""Settings of other trainers and deliberate mistakes, as patterns, by the only page that shows them."""

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def settings_of(node: object, prefix: str = "") -> set[str]:
    """Names of the settings and groups of a schema."""
    names = set()
    for field in dataclasses.fields(node):  # type: ignore[arg-type]
        name, value = f"{prefix}{field.name}", getattr(node, field.name)
        names |= {name} | (settings_of(value, f"{name}.") if dataclasses.is_dataclass(value) else set())
    return names


GROUPS = {name.partition(".")[0] for name in settings_of(Config()) if "." in name}
SETTINGS = settings_of(Config()) | settings_of(RewardModelConfig())
WITH_SETTINGS = {name.rpartition(".")[0] for name in SETTINGS}
READ_BY_REWARDS = {f"rollout.{name}" for name in dir(Rollout) if not name.startswith("_")}


def exists(dotted: str) -> bool:
    """True for a setting, a key inside a dictionary setting, a field of a rollout, a module and a name in it."""
    parts = dotted.split(".")
    prefixes = [parts[:end] for end in range(2, len(parts) + 1)]
    paths = [ROOT.joinpath(*prefix) for prefix in prefixes]
    return (
        dotted in SETTINGS | READ_BY_REWARDS
        or any(".".join(prefix) in SETTINGS - WITH_SETTINGS for prefix in prefixes)
        or any(path.is_dir() or path.with_suffix(".py").exists() for path in paths)
    )


@every_page
def test_every_setting_that_a_page_names_is_one(page: Path) -> None:
    text = page.read_text()
    code = " ".join(re.findall(r"`([^`\n]+)`", text) + re.findall(r"^```\w*\n(.*?)^```$", text, re.M | re.S)) + " "
    named = set(re.findall(rf"(?<![\w./-])((?:{'|'.join(GROUPS)})\.[a-z_]+(?:\.[a-z_]+)*)(?=[=\s'\"`,;)\]])", code))
    files = {name for name in named if name.endswith((".py", ".md", ".yaml", ".json", ".jsonl"))}
    foreign = {name for name in named if re.match(FOREIGN.get(page.name, "$"), name)}
    assert sorted(name for name in named - files - foreign if not exists(name)) == []


@every_page
def test_every_preset_that_a_page_chooses_is_one(page: Path) -> None:
    groups = [folder.name for folder in (ROOT / "configs").iterdir() if folder.is_dir() and folder.name != "accelerate"]
    chosen = re.findall(rf"(?<![\w./])({'|'.join(groups)})=([a-z]\w*)(?![\w/])", page.read_text())
    assert [f"{group}={name}" for group, name in chosen if not (ROOT / f"configs/{group}/{name}.yaml").exists()] == []


@every_page
def test_every_file_that_a_page_names_or_links_is_there(page: Path) -> None:
    """Links and anchors between the pages of the site: `test_the_site_builds_without_a_warning`."""
    folders = "lab|integrations|trainer|rollout|rewards|demo|scripts|configs|tests|docs|benchmarks|examples"
    named = re.findall(rf"(?<![\w./<-])((?:{folders})/[\w./-]*\w\.(?:py|md|yaml|png|sh))(?!\w)", page.read_text())
    links = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    files = [ROOT / name for name in named] + [page.parent / link for link in links]
    assert [str(file) for file in files if not file.exists()] == []


@every_page
def test_every_command_on_a_page_is_run_by_a_test_or_says_what_it_needs(page: Path) -> None:
    assert commands_outside_of_blocks(page) == [], "put it into a bash block"
    for block in bash_blocks(page):
        if block.needs is not None:
            assert re.search(r"GPU|hub|package index|verifiers|pip install|Docker|another machine", block.needs), (
                f"{block} needs {block.needs}: not here?"
            )
            continue
        assert block.commands, f"{block} has no command; is it bash?"
        assert [command for command in block.commands if not re.match(f"{RUN}|{PLANNED}", command)] == [], block


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Strict: a page outside of the navigation, a broken link or anchor ends the build (but not with --quiet)."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "token_match_rate" in (tmp_path / "site/tokens/index.html").read_text()
