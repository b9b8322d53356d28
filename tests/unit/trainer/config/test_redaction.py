"""Redaction of secrets in settings and on command lines."""

from __future__ import annotations

import json
import re

import pytest
from omegaconf import OmegaConf

from lockstep.trainer.config.redaction import REDACTED, redact, redact_words
from lockstep.trainer.config.schema import Config
from tests.fixtures.paths import ROOT

SECRETS = {
    "gateway": {"api_key": "hunter2", "port": 8000, "host": "127.0.0.1"},
    "settings": {"judge": {"HF_TOKEN": "hunter2", "url": "https://user:hunter2@host/v1", "api_key_env": "JUDGE_KEY"}},
    "tools": ["--key", "sk-hunter2hunter2hunter2"],
    "note": "Bearer hunter2hunter2 and hf_hunter2hunter2hunter2",
    "password": ["hunter2"],
}


def test_only_secrets_are_redacted():
    shown = redact(SECRETS)
    assert "hunter2" not in json.dumps(shown)
    assert shown["gateway"] == {"api_key": REDACTED, "port": 8000, "host": "127.0.0.1"}
    assert shown["settings"]["judge"]["api_key_env"] == "JUDGE_KEY"
    plain = {
        "max_tokens": 5,
        "query_tokens": "7:",
        "response_tokens": "7:",
        "token_budget": 16384,
        "stop_token_ids": [1],
        "tokenizer": "x",
        "mode": "token_truncate",
    }
    assert redact(plain) == plain
    assert redact({"token_level": "a", "importance_sampling_level": "token", "api_key": None}) == {
        "token_level": "a", "importance_sampling_level": "token", "api_key": None}  # fmt: skip


def test_a_number_under_a_secret_name_is_redacted():
    assert redact({"password": 123456, "max_tokens": 5, "token": True}) == {
        "password": REDACTED, "max_tokens": 5, "token": True}  # fmt: skip


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("gateway.api_key=hunter2", "gateway.api_key=<redacted>"),
        ("++gateway.api_key=2222", "++gateway.api_key=<redacted>"),
        ("+api_key='hunter 2'", "+api_key=<redacted>"),
        ("url=https://user:hunter2@host/v1", "url=https://<redacted>@host/v1"),
        ("--config-dir=https://user:hunter2@host", "--config-dir=https://<redacted>@host"),
        ("sk-hunter2hunter2hunter2", "<redacted>"),
        ("reward.settings={judge: {token: hunter2, n: 3}}", "reward.settings={judge: {token: '<redacted>', n: 3}}"),
        ("x={api_key:hunter2,who:'it\\'s',on:true}", "x={api_key: '<redacted>', who: 'it\\'s', on: true}"),
    ],
)
def test_secrets_on_a_command_line_are_redacted(word: str, shown: str):
    assert redact_words([word]) == [shown]


def test_words_without_secrets_are_unchanged():
    words = [
        "train.py",
        "--cfg",
        "job",
        "api_key=null",
        "a='x y'",
        "b={c:d}",
        "~x",
        "updates=5",
        "rollout.urls=[]",
        "=",
    ]
    assert redact_words(words) == words


NAMES = (
    "x-api-key", "api-key", "apikey", "API_KEY", "secret_key", "openai_key", "OPENAI_API_KEY", "wandb_key", "pwd",
    "passphrase", "auth", "jwt", "token", "tokens", "hf-token", "cookie", "Set-Cookie", "Authorization",
    "proxy-authorization", "client_secret", "aws_secret_access_key", "AWS_SESSION_TOKEN", "private_key", "db_password",
    "secrets",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_of_secrets_redact_values_lists_and_mappings(name: str):
    for value in ("hunter2", ["hunter2"], {"user": "hunter2", "deep": {"n": "hunter2"}}):
        shown = json.dumps(redact({"settings": {"headers": {name: value}}}))
        assert "hunter2" not in shown
    assert redact({name: None}) == {name: None}
    if name != "tokens":  # a number of them is a count
        assert redact({name: [2222]}) == {name: [REDACTED]}
        assert redact({name: 1.5}) == {name: REDACTED}
    assert redact_words([f"a.b.{name}=hunter2", f"--{name}", "hunter2", f"--{name}=hunter2", "c=1"]) == [
        f"a.b.{name}={REDACTED}", f"--{name}", REDACTED, f"--{name}={REDACTED}", "c=1"]  # fmt: skip
    assert redact_words([f"a.{name}.user=hunter2"]) == [f"a.{name}.user={REDACTED}"]


VALUES = (
    "ghp_", "github_pat_11ABC_", "glpat-", "hf_", "sk-", "sk-ant-api03-", "sk-proj-", "gsk_", "xai-", "nvapi-",
    "xapp-1-", "xoxb-", "npm_", "pypi-", "Basic ", "Bearer ", "AIzaSyA0123456789",
)  # fmt: skip


@pytest.mark.parametrize("prefix", VALUES)
def test_keys_of_known_formats_are_redacted_in_any_text(prefix: str):
    key = f"{prefix}hunter2hunter2Hunter2hunter2"
    for text in (key, f"use {key}, please", f"x={key}", f'{{"a": "{key}"}}', f"https://host/{key}/x"):
        for shown in (redact(text), redact({"note": [text]})["note"][0], redact_words([text])[0]):
            assert "unter2" not in shown, shown
    assert redact({key: 1}) == {REDACTED: 1}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ASIAABCDEFGHIJKLMNOP", REDACTED),
        ("a -----BEGIN RSA PRIVATE KEY-----\nhunter2\n-----END RSA PRIVATE KEY----- b", f"a {REDACTED} b"),
        ("-----BEGIN PRIVATE KEY-----\nhunter2", REDACTED),
        ("https://hunter2@host/x", f"https://{REDACTED}@host/x"),
        ("https://user:hun/ter@2@host/x", f"https://{REDACTED}@host/x"),
        ("https://host/v1?a=1&api_key=hunter2&b=2", f"https://host/v1?a=1&api_key={REDACTED}&b=2"),
        ("https://host/#access_token=hunter2", f"https://host/#access_token={REDACTED}"),
        ("postgres://u:hunter2@127.0.0.1:5432/db", f"postgres://{REDACTED}@127.0.0.1:5432/db"),
    ],
)
def test_keys_and_passwords_in_texts_and_urls_are_redacted(text: str, shown: str):
    assert redact(text) == shown


@pytest.mark.parametrize(
    "words",
    [["--hf-token", "hunter2"], ["--hf-token=hunter2"], ["--api-key", "hunter2"], ["--ssl-keyfile-password=hunter2"]],
    ids=" ".join,
)
def test_arguments_of_a_server_are_redacted_as_a_list_and_as_an_override(words: list[str]):
    assert "hunter2" not in json.dumps(redact({"server": {"vllm_args": ["--max-num-seqs", "4", *words]}}))
    shown = redact_words([f"server.vllm_args=[--max-num-seqs,4,{','.join(words)}]"])
    assert "hunter2" not in shown[0]
    assert "max-num-seqs" in shown[0]


def settings_and_words() -> tuple[dict, list[str]]:
    """All settings, and command lines and pages of the repository: none holds a secret."""
    pages = [*ROOT.glob("docs/*.md"), ROOT / "README.md", *ROOT.rglob("configs/**/*.yaml")]
    words = {word.strip("`'\"(),;") for page in pages for word in page.read_text().split()}
    return OmegaConf.to_container(OmegaConf.structured(Config())), sorted(words)


PAGES_WITH_KEYS = re.compile(r"(token|key|TOKEN|KEY|auth|secret)(\S*[=:]|\S*/)", re.IGNORECASE)


def test_ordinary_settings_and_words_are_not_redacted():
    values, words = settings_and_words()
    assert redact(values) == values
    ordinary = {
        "max_tokens": 5, "token_budget": 16384, "stop_token_ids": [1], "tokenizer": "a/b", "tokenizer_path": "x",
        "max_new_tokens": 9, "num_tokens": 3, "tokens": 9, "eos_token": "</s>", "pad_token": "<pad>",
        "extra_special_tokens": {"a": "b"}, "sampled_tokens": 7, "author": "me", "keys": ["a"], "key": "answer",
        "label_key": "x", "monkey": 1, "columns": {"prompt": "question", "answer": "key"}, "normalizer": "token",
        "mode": "token_truncate", "url": "http://127.0.0.1:8000/v1?limit=5", "api_key_env": "JUDGE_KEY", "bypass": 1,
        "system_prompt": "Basic arithmetic. Token normalization; bearer instruments. Say token 5 or key=value.",
        "model": "sk-learn-of-some-kind", "mail": "send to a@b.c and http://x/y", "turn_level": "sequence",
        "compass": "n", "authors": ["a"], "path": "sk-learn/data",
    }  # fmt: skip
    assert redact(ordinary) == ordinary
    pages = [line for page in ROOT.glob("docs/*.md") for line in page.read_text().splitlines()]
    lines = [line for line in pages if redact(line) != line]
    assert [line for line in lines if "api_key=" not in line and "--secret HF_TOKEN" not in line] == []
    assert len(lines) <= 3
    changed = [word for word in words if redact_words([word]) != [word]]
    assert len(words) > 3000
    assert not [word for word in changed if not PAGES_WITH_KEYS.search(word)], changed
    assert len(changed) <= 12, changed
