"""Redaction of secrets in settings and on command lines."""

from __future__ import annotations

import json

import pytest

from trainer.config.redaction import REDACTED, redact, redact_words

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
    plain = {"max_tokens": 5, "token_budget": 16384, "stop_token_ids": [1], "tokenizer": "x", "mode": "token_truncate"}
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
