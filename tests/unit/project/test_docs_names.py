"""What the pages name is there: settings, files, links between pages, presets."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.records import Rollout
from tests.fixtures.pages import PAGES, ROOT
from trainer.config.schema import Config
from trainer.reward_model.config import RewardModelConfig

GROUPS = {field.name: type(getattr(Config(), field.name)) for field in dataclasses.fields(Config)}
GROUPS = {name: kind for name, kind in GROUPS.items() if dataclasses.is_dataclass(kind)}
READ_BY_REWARDS = {f"rollout.{field.name}" for field in dataclasses.fields(Rollout)}
# Settings of other trainers, and mistakes that are made on purpose, look like ours; they stand on these pages alone.
FOREIGN = {
    "first-hour.md": re.compile(r"^(algorithm\.clip_hgh|model\.load_in_)"),
    "migrating.md": re.compile(
        r"^(data\.train_batch_size|reward_model|algorithm\.(adv_estimator|norm_adv|use_kl|lam\b|rollout_|filter))"
    ),
}


def exists(path: str) -> bool:
    """Whether a.b.c is a field of a schema or a module, or what a reward reads; what lies inside a dictionary is the
    user's own."""
    if path in READ_BY_REWARDS:
        return True
    module = path.split(".")
    is_module = any((ROOT / "/".join(module[:end])).with_suffix(".py").exists() for end in range(2, len(module) + 1))
    is_package = (ROOT / "/".join(module[:2])).is_dir()
    return is_module or is_package or is_setting(path, Config) or is_setting(path, RewardModelConfig)


def is_setting(path: str, settings: type) -> bool:
    for part in path.split("."):
        fields = {field.name: field for field in dataclasses.fields(settings)}
        if part not in fields:
            return False
        default = getattr(settings(), part)
        if not dataclasses.is_dataclass(default):
            return True
        settings = type(default)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_that_a_page_names_is_one(page: Path):
    code = " ".join(re.findall(r"`([^`\n]+)`", page.read_text())) + " "
    code += " ".join(re.findall(r"^```\w*\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))
    named = set(re.findall(rf"(?<![\w./-])((?:{'|'.join(GROUPS)})\.[a-z_]+(?:\.[a-z_]+)*)(?=[=\s'\"`,;)\]]|$)", code))
    foreign = FOREIGN.get(page.name)
    files = {name for name in named if name.endswith((".py", ".md", ".yaml", ".json", ".jsonl"))}
    wrong = sorted(name for name in named - files if not exists(name) and not (foreign and foreign.match(name)))
    assert not wrong, f"{page.name} names settings that do not exist: {wrong}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page: Path):
    text = page.read_text()
    folders = "trainer|rollout|rewards|scripts|configs|tests|docs|benchmarks"
    named = set(re.findall(rf"(?<![\w./<-])((?:{folders})/[\w./-]*\w\.(?:py|md|yaml|png|sh))(?!\w)", text))
    missing = sorted(name for name in named if not (ROOT / name).exists())
    assert not missing, f"{page.name} names files that do not exist: {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path):
    links = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    broken = sorted(link for link in links if not (page.parent / link).exists())
    assert not broken, f"{page.name} links to what is not there: {broken}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_preset_that_a_page_chooses_is_one(page: Path):
    groups = [folder.name for folder in (ROOT / "configs").iterdir() if folder.is_dir() and folder.name != "accelerate"]
    chosen = re.findall(rf"(?<![\w./])({'|'.join(groups)})=([a-z][\w]*)(?![\w/])", page.read_text())
    wrong = sorted(
        {f"{group}={name}" for group, name in chosen if not (ROOT / f"configs/{group}/{name}.yaml").exists()}
    )
    assert not wrong, f"{page.name} chooses presets that do not exist: {wrong}"


def test_the_site_builds_without_a_warning(tmp_path: Path):
    """Strict: a page outside the navigation, a broken link or anchor ends the build (but not with --quiet)."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "token_match_rate" in (tmp_path / "site/tokens/index.html").read_text()
