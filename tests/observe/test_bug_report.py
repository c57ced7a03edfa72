"""The bundle for a bug report has what helps, and no secret."""

from __future__ import annotations

import json
import shlex
import stat
import tarfile
from pathlib import Path

import pytest

from torsh_distributed.observe.bug_report import collect
from torsh_distributed.observe.machine.diagnostic_result import DiagnosticResult
from torsh_distributed.observe.secret_mask import MASK, SecretMask

SECRETS = {
    "HF_TOKEN": "hf_abcdefghijklmnopqrstuv",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "TORSH_JOB_TOKEN": "correct horse battery staple",
    "DATABASE_PASSWORD": "hunter2!",
    "SLACK_WEBHOOK": "https://hooks.slack.com/services/T000/B000/XXXX",
}
SHAPES = (
    "postgres://me:s3cr3tpass@db/x",
    "Authorization: Bearer abcdef1234567890",
    "AKIAIOSFODNN7EXAMPLE",
    "ghp_0123456789abcdefABCDEF0123456789",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc-DEF_123",
    '{"password": "pa55w0rd"}',
    "--token abcdef123",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----",
    "0123456789abcdef" * 4,
)
PARTS = (
    "s3cr3tpass",
    "abcdef1234567890",
    "AKIAIOSFODNN7EXAMPLE",
    "ghp_0123456789",
    "eyJhbGci",
    "pa55w0rd",
    "abcdef123",
    "MIIEow",
)


def test_no_secret_gets_out_and_the_rest_stays(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    (logs / "attempt-0").mkdir(parents=True)
    lines = [f"step 7: loss 0.25 with {name}={value} and again {value}" for name, value in SECRETS.items()]
    (logs / "attempt-0" / "rank-0.stderr.log").write_text("\n".join([*lines, *SHAPES, "the last line"]))
    (logs / "weights.pt").write_bytes(b"\0" * 100)
    secret_file = tmp_path / "secret"
    secret_file.write_text("the-secret-of-the-job")
    secret_file.chmod(0o600)
    environ = {
        **SECRETS,
        "TORSH_SECRET_FILE": str(secret_file),
        "MASTER_ADDR": "10.0.0.1",
        "REDIS_URL": "redis://:p4ssw0rd@host:6379",
        "CMD": "run --key the-secret-of-the-job",
    }
    target = tmp_path / "report.tar.gz"
    names = collect(
        target,
        environ=environ,
        results=[DiagnosticResult(check_name="x", description="saw hunter2! here")],
        files=[logs],
        reports={"diagnosis": {"text": f"rank 1 is at open({SECRETS['HF_TOKEN']!r})"}},
    )
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    with tarfile.open(target) as archive:
        content = {one.name: archive.extractfile(one).read().decode() for one in archive if one.isfile()}  # type: ignore[union-attr]  # files
    everything = "\n".join([*content, *content.values()])
    for secret in [*SECRETS.values(), *PARTS, "the-secret-of-the-job", "p4ssw0rd"]:
        assert secret not in everything, secret
    variables = json.loads(content["report/environment.json"])
    assert variables["MASTER_ADDR"] == "10.0.0.1"
    assert variables["HF_TOKEN"] == MASK
    log = content["report/files/logs/attempt-0/rank-0.stderr.log"]
    assert "step 7: loss 0.25" in log
    assert log.endswith("the last line")
    assert "100 bytes" in content["report/files/logs/weights.pt.size"]
    assert len(names) == len(content)


@pytest.mark.parametrize(
    "text", ["loss=0.125 token count: 512", "tokens/s: 1000", "num_tokens 4096", "PATH=/usr/bin:/bin"]
)
def test_plain_text_is_readable_afterwards(text: str) -> None:
    masked = SecretMask({}).text(text)
    assert masked.split()[0] == text.split()[0]


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
