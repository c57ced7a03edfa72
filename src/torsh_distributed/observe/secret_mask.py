"""Keeps secrets out of what leaves the machine. Imports little: the launcher uses it for every job."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping

MASK = "***"
_NAMES = re.compile(
    r"TOKEN|SECRET|PASS(WORD|WD|PHRASE)?|PWD$|API_?KEY|ACCESS_?KEY|PRIVATE|CREDENTIAL|AUTH|COOKIE|SESSION|SIGNATURE|"
    r"DSN|_KEY$|^KEY$|WEBHOOK|CONNECTION_STRING|BEARER|NETRC",
    re.IGNORECASE,
)
# Names that sound secret and are not: their values help, and are masked like all text if they look like secrets.
_HARMLESS = frozenset({"PWD", "OLDPWD", "SSH_AUTH_SOCK", "XDG_SESSION_ID", "XDG_SESSION_TYPE", "XDG_SESSION_CLASS"})
_SHORTEST = 4
_LEFT = r"(?<![A-Za-z0-9_])"
_WORDS = (
    r"token|secret|passwd|password|passphrase|api[_-]?key|access[_-]?key|private[_-]?key|credentials?"
    r"|webhook(?:[_-]?url)?"
)
_USER = r"(?<!\S)[\"']?(?:-[uU]|--(?:proxy-)?user)"
_OPTION = re.compile(rf"(?:{_WORDS}|auth|cookies?|session[_-]?id|dsn|pwd|pass|key)$", re.IGNORECASE)
_PREFIXES = r"hf|ghp|gho|ghs|ghu|github_pat|glpat|sk|pk|rk|xox[a-z]|npm|pypi|dop_v1"
_SHAPES = (
    # user:password in an address
    (re.compile(r"(?P<keep>[a-z][a-z0-9+.-]*://[^/\s:@]*:)[^@\s/]+(?=@)", re.IGNORECASE), r"\g<keep>" + MASK),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), MASK),
    (re.compile(r"(?P<keep>\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE), r"\g<keep>" + MASK),
    # "password": "…"; token=…; --api-key …
    (re.compile(rf"(?P<keep>(?:{_WORDS})[\"']?\s*[=:]\s*[\"'])[^\"'\n]{{3,}}", re.IGNORECASE), r"\g<keep>" + MASK),
    (re.compile(rf"(?P<keep>(?:{_WORDS})\s*[=:]\s*)[^\s\"',;&]{{3,}}", re.IGNORECASE), r"\g<keep>" + MASK),
    (re.compile(rf"(?P<keep>--[a-z-]*(?:{_WORDS})\s+)[^\s\"'-][^\s\"']{{2,}}", re.IGNORECASE), r"\g<keep>" + MASK),
    # curl -u name:password, --user=name:password, ["-u", "name:password"]
    (re.compile(rf"(?P<keep>{_USER}[\s=\"',]*[^\s:=+%\"',]+:)[^\s\"',]+"), r"\g<keep>" + MASK),
    (re.compile(r"(?P<keep>\bcookies?[\"']?\s*[=:]\s*)\{[^}\n]*\}", re.IGNORECASE), r"\g<keep>" + MASK),
    # Cookie: …; "Set-Cookie": "…"; curl -b 'a=b; c=d'
    (re.compile(r"(?P<keep>\bcookies?[\"']?\s*[=:]\s*[\"']?)[^\"'\n]{3,}", re.IGNORECASE), r"\g<keep>" + MASK),
    (re.compile(r"(?P<keep>(?<!\S)(?:-b|--cookie)[\s=]*[\"'])[^\"'\n]+"), r"\g<keep>" + MASK),
    (re.compile(r"(?P<keep>(?<!\S)(?:-b\s*|--cookie[\s=]+)[^\s=\"']+=)[^\s\"']+"), r"\g<keep>" + MASK),
    (re.compile(_LEFT + r"(?:AKIA|ASIA)[A-Z0-9]{12,}"), MASK),
    (re.compile(_LEFT + rf"(?:{_PREFIXES})[-_][A-Za-z0-9_-]{{10,}}"), MASK),
    (re.compile(_LEFT + r"eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*"), MASK),
    (re.compile(r"https://hooks\.slack\.com/\S+|https://discord(?:app)?\.com/api/webhooks/\S+"), MASK),
    (re.compile(_LEFT + r"[0-9a-f]{64}(?![0-9a-f])"), MASK),  # the form of a job's own secret
)  # fmt: skip


class SecretMask:
    """Replaces secrets by `***`. Knows the values of secret variables, wherever else they occur."""

    def __init__(self, environ: Mapping[str, str], *, also: Iterable[str] = ()) -> None:
        values = {value for name, value in environ.items() if is_secret_name(name)} | set(also)
        # Longest first: one secret may contain another.
        self._values = sorted((value for value in values if len(value) >= _SHORTEST), key=len, reverse=True)

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Variables with the values of secret ones hidden, and secrets in the values of others."""
        return {
            name: MASK if is_secret_name(name) and value else self.text(value)
            for name, value in sorted(environ.items())
        }

    def text(self, text: str) -> str:
        """Any text, with what is or looks like a secret hidden."""
        for value in self._values:
            text = text.replace(value, MASK)
        for pattern, replacement in _SHAPES:
            text = pattern.sub(replacement, text)
        return text

    def command(self, words: Iterable[str]) -> str:
        """A command line as people read it, with the values of options that take secrets hidden."""
        shown, hides_next = [], False
        for word in words:
            name, is_given, _ = word.partition("=")
            is_option = word.startswith("-") and _OPTION.search(name) is not None
            if hides_next and not word.startswith("--"):
                shown.append(MASK)
            elif is_option and is_given:
                shown.append(f"{name}={MASK}")
            else:
                shown.append(self.text(shlex.quote(word)))
            hides_next = is_option and not is_given
        return self.text(" ".join(shown))


def is_secret_name(name: str) -> bool:
    """Whether a variable of that name usually holds a secret."""
    return name not in _HARMLESS and _NAMES.search(name) is not None
