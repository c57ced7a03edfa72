"""Secrets on command lines, in headers and in cookies are hidden, and what helps stays."""

from __future__ import annotations

import shlex

import pytest

from torsh_distributed.observe.bug_report.masking import SecretMask

SECRET = "hunter2hunter2"


@pytest.mark.parametrize(
    "text",
    [
        f"curl -u name:{SECRET} https://example.org",
        f"curl -uname:{SECRET} https://example.org",
        f'curl --user "name:{SECRET}" https://example.org',
        f"curl --proxy-user=name:{SECRET} https://example.org",
        f'["curl", "-u", "name:{SECRET}"]',
        f"Cookie: sid={SECRET}; theme=dark",
        f"set-cookie: sid={SECRET}; Path=/",
        f'{{"Cookie": "sid={SECRET}; a=b"}}',
        f"curl -b 'sid={SECRET}; a=b' https://example.org",
        f"curl -b sid={SECRET} https://example.org",
        f"curl --cookie sid={SECRET} https://example.org",
        f"cookies={{'sid': '{SECRET}'}}",
    ],
)
def test_what_curl_and_browsers_send_is_hidden(text: str) -> None:
    assert SECRET not in SecretMask({}).text(f"before\n{text}\nafter")


@pytest.mark.parametrize(
    "text", ["python -u train.py", "docker run -u worker image", "loss at 3:4", "torsh run -b 3", "date -u +%H:%M"]
)
def test_other_options_stay(text: str) -> None:
    assert SecretMask({}).text(text) == text


@pytest.mark.parametrize(
    "options",
    [
        f"--api-key {SECRET}",
        f"--api-key={SECRET}",
        f"--hf_token {SECRET}",
        f"--wandb-key '{SECRET} with spaces'",
        f"--password -{SECRET}",
        f"--db.password={SECRET}",
        f"-u name:{SECRET}",
    ],
)
def test_a_command_shows_no_secret(options: str) -> None:
    words = ["train.py", "--layers", "12", *shlex.split(options), "--num-tokens", "512"]
    shown = SecretMask({}).command(words)
    assert SECRET not in shown
    assert shown.startswith("train.py --layers 12 ")
    assert shown.endswith("--num-tokens 512")
