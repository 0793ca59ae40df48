"""A storage that can be listed and read but not written: what is in front of the S3 server refuses every write."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import threading
from collections.abc import Iterator

REFUSED = (
    b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>AccessDenied</Code><Message>Access Denied.</Message></Error>'
)


@contextlib.contextmanager
def refusing_writes(endpoint: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the address of the front, and the paths of the writes it has refused so far."""
    refused: list[str] = []

    class Front(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            behind = http.client.HTTPConnection(endpoint.removeprefix("http://"), timeout=30)
            # The signature covers the Host header, so it goes through as it came.
            behind.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                behind.putheader(name, value)
            behind.endheaders()
            answer = behind.getresponse()
            body = answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                    self.send_header(name, value)
            self.answer(body)
            behind.close()

        def refuse(self) -> None:
            refused.append(self.path)
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(403)
            self.send_header("Content-Type", "application/xml")
            self.answer(REFUSED)

        def answer(self, body: bytes) -> None:
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = pass_on
        do_PUT = do_POST = do_DELETE = refuse

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Front)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", refused
    finally:
        server.shutdown()
        server.server_close()
