"""The page as one file: state, style and script inside, nothing loaded from elsewhere, for the end of a job."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

from torsh_distributed.private_files import open_private


def asset(name: str) -> str:
    """A file of the page."""
    return (files("torsh_distributed.observe.page") / "assets" / name).read_text(encoding="utf-8")


def html_page() -> str:
    """The page as it is served live: script and style are files beside it."""
    return asset("page.html")


def html_report(state: dict[str, Any]) -> str:
    """The page with `state` in it. Only its own script and style may run, by their hashes."""
    script, style = asset("page.js"), asset("page.css")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    # In JSON every "<" may be written as an escape, so no text of a job can end the element.
    data = json.dumps(state, default=str, allow_nan=False).replace("<", "\\u003c")
    return (
        html_page()
        .replace('<link rel="stylesheet" href="page.css">', f"<style>{style}</style>")
        .replace('<script src="page.js" defer></script>', "")
        .replace(
            "</head>",
            f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}"></head>',
        )
        .replace(
            "</body>", f'<script type="application/json" id="state">{data}</script><script>{script}</script></body>'
        )
    )


def write_report(path: str | Path, state: dict[str, Any]) -> Path:
    """Write the report, whole or not at all; this user alone can read it."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    data = html_report(state).encode()
    fd = open_private(partial, os.O_WRONLY | os.O_TRUNC)
    try:
        while data:
            data = data[os.write(fd, data) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    partial.replace(target)
    return target


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
