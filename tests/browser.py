"""Headless Chromium for tests of the page: opens it from a file, runs a script in it, and hears what that answers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")

_WATCH = """<script>
window.faults = [];
window.addEventListener("error", (event) => window.faults.push(event.message));
console.error = (...words) => window.faults.push(words.join(" "));
</script>"""
_ASK = """<script>
const answer = document.createElement("pre");
answer.id = "answer";
try { answer.textContent = JSON.stringify({faults: window.faults, ...(() => { %s })()}); }
catch (error) { answer.textContent = JSON.stringify({faults: [String(error.stack || error)]}); }
document.body.append(answer);
</script>"""


def ask(page: str, script: str, folder: Path, *options: str) -> dict[str, Any]:
    """What a script answers after the page is there: the object that it returns, and ``faults``, errors so far."""
    assert CHROMIUM is not None
    path = folder / "asked.html"
    text = page.replace("<head>", "<head>" + _WATCH, 1).replace("</body>", _ASK % script + "</body>", 1)
    path.write_text(text, encoding="utf-8")
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"),
        *("--window-size=1200,900", "--virtual-time-budget=2000", f"--user-data-dir={folder / 'profile'}", *options),
        *("--dump-dom", path.as_uri()),
    ]
    environment = {**os.environ, "HOME": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    match = re.search(r'<pre id="answer">(.*?)</pre>', done.stdout, re.S)
    assert match, done.stderr[-2000:]
    return json.loads(unescape(match.group(1)))
