"""A stand-in for the Hugging Face hub on this machine: the files of folders, with their sha256, sizes and ranges, over its HTTP API."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._answer(is_head=False)

    def do_HEAD(self):
        self._answer(is_head=True)

    def _answer(self, *, is_head):
        hub, path = self.server.hub, unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path, self.headers.get("Range")))
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            self._send_json(hub, match[1])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._send_file(hub, match[1], match[3], is_head=is_head)
        else:
            self._send(404, {"X-Error-Code": "RepoNotFound"})

    def _send_json(self, hub, repo):
        if repo not in hub.repositories:
            self._send(404, {"X-Error-Code": "RepoNotFound"})
            return
        siblings = [
            {"rfilename": name, "size": len(data), "lfs": {"sha256": sha256(data), "size": len(data), "pointerSize": 130}}
            for name, data in hub.repositories[repo].items()
        ]
        about = {"id": repo, "modelId": repo, "sha": COMMIT, "private": False, "siblings": siblings, "tags": [], "downloads": 0}
        about["cardData"] = {"license": hub.licenses.get(repo, "apache-2.0")}
        self._send(200, {"Content-Type": "application/json"}, json.dumps(about).encode())

    def _send_file(self, hub, repo, name, *, is_head):
        data = hub.repositories.get(repo, {}).get(name)
        if data is None:
            self._send(404, {"X-Error-Code": "RepoNotFound" if repo not in hub.repositories else "EntryNotFound"})
            return
        stated = hub.stated.get(name, sha256(data))
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{stated}"', "Accept-Ranges": "bytes"}
        start, end = 0, len(data)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked:
            start, end = int(asked[1]), min(len(data), int(asked[2]) + 1 if asked[2] else len(data))
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        body = data[start:end]
        if is_head:
            self._send(206 if asked else 200, headers, length=len(body))
            return
        cut = hub.cuts.pop(name, None)
        self._send(206 if asked else 200, headers, body if cut is None else body[:cut], length=len(body))
        if cut is not None:
            self.wfile.flush()
            hub.goes_on.wait(60)
            self.close_connection = True

    def _send(self, status, headers, body=b"", *, length=None):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


class LocalHub:
    """`with LocalHub({"owner/repo": {"file.gguf": b"..."}}) as hub:`; `hub.environment(home)` points a process at it.

    `stated` gives a file another sha256 than its own. `cuts` stops the next download of a file after so many bytes, until `goes_on` is set,
    and then breaks the connection. `requests` are all (verb, path, range) so far.
    """

    def __init__(self, repositories=None):
        self.repositories = repositories or {}
        self.licenses, self.stated, self.cuts, self.requests = {}, {}, {}, []
        self.goes_on = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        self._thread = threading.Thread(target=self._server.serve_forever)

    @property
    def url(self):
        return f"http://127.0.0.1:{self._server.server_port}"

    def environment(self, cache: Path):
        """Variables with which the hub's library asks this hub, and keeps its files in `cache`."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": ""}

    def downloads(self, name):
        """The ranges with which a file was downloaded; None for a whole one."""
        return [asked for verb, path, asked in self.requests if verb == "GET" and path.endswith(f"/{name}")]

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.goes_on.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def sha256(data):
    return hashlib.sha256(data).hexdigest()
