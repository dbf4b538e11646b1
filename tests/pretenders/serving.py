"""An HTTP server that answers what it is given; it starts a child of its own, as engines do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def serve(port: int, pages: dict[str, str], answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            self._say(pages.get(self.path, ""), 200 if self.path in pages else 404)

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._say(json.dumps(answer(asked)), 200)

        def _say(self, text: str, status: int) -> None:
            said = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "a child of a pretender"])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
