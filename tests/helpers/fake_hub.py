"""As much of the Hub's HTTP API as an upload needs, on this machine: what was uploaded is kept in memory."""

import base64
import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import transformers.utils.hub
import yaml
from huggingface_hub import constants, hf_api

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    def __init__(self):
        self.repositories: dict[str, dict] = {}  # id -> what the creation said
        self.files: dict[str, dict[str, bytes]] = {}  # id -> path -> content
        self.objects: dict[str, bytes] = {}  # sha256 -> large file
        self.tokens: set[str | None] = set()
        self.refuse_commit = False

    def commit(self, repository: str, lines: list[dict]):
        files = self.files.setdefault(repository, {})
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]


def handler(hub: FakeHub, url: str):
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def answer(self, body: dict, status: int = 200, headers: dict | None = None):
            encoded = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(encoded)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(encoded)

        def body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def do_POST(self):
            hub.tokens.add(self.headers.get("Authorization"))
            body, path = self.body(), self.path.split("?")[0]
            if path == "/api/repos/create":
                wanted = json.loads(body)
                repository = f"{wanted['organization']}/{wanted['name']}"
                existed = repository in hub.repositories
                hub.repositories.setdefault(repository, wanted)
                return self.answer({"url": f"{url()}/{repository}"}, 409 if existed else 200)
            if path == "/api/validate-yaml":  # of a card, before it is uploaded
                yaml.safe_load(json.loads(body)["content"].split("---")[1] if b"---" in body else "")
                return self.answer({"errors": [], "warnings": []})
            if "/preupload/" in path:
                files = json.loads(body)["files"]
                modes = ["lfs" if f["path"].endswith(".safetensors") else "regular" for f in files]
                return self.answer(
                    {
                        "files": [
                            {"path": f["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None}
                            for f, mode in zip(files, modes)
                        ]
                    }
                )
            if path.endswith("/info/lfs/objects/batch"):
                wanted = json.loads(body)["objects"]
                uploads = [
                    {"oid": o["oid"], "size": o["size"], "actions": {"upload": {"href": f"{url()}/lfs/{o['oid']}"}}}
                    for o in wanted
                ]
                return self.answer({"transfer": "basic", "objects": uploads})
            if "/commit/" in path:
                if hub.refuse_commit:
                    return self.answer({"error": "You have no write access"}, 403)
                repository = "/".join(path.split("/")[3:5])
                hub.commit(repository, [json.loads(line) for line in body.splitlines()])
                page = f"{url()}/{repository}"
                return self.answer({"commitUrl": f"{page}/commit/{COMMIT}", "commitOid": COMMIT, "hookOutput": ""})
            self.answer({"error": f"the fake Hub does not know {path}"}, 404)

        def do_PUT(self):
            body, oid = self.body(), self.path.rsplit("/", 1)[1]
            if hashlib.sha256(body).hexdigest() != oid:
                return self.answer({"error": "another sha256"}, 400)
            hub.objects[oid] = body
            self.answer({})

        def do_DELETE(self):
            wanted = json.loads(self.body())
            hub.repositories.pop(f"{wanted['organization']}/{wanted['name']}")
            self.answer({})

        def do_GET(self):
            parts = self.path.split("?")[0].split("/")
            repository = "/".join(parts[3:5])
            if parts[1:3] == ["api", "models"] and repository not in hub.repositories:
                return self.answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            if parts[1:3] == ["api", "models"] and parts[5:6] == ["tree"]:
                entries = [
                    {"type": "file", "path": path, "size": len(content), "oid": "0"}
                    for path, content in hub.files.get(repository, {}).items()
                ]
                return self.answer(entries)
            if parts[1:3] == ["api", "models"] and len(parts) == 5:
                return self.answer({"id": repository, "sha": COMMIT, "siblings": []})
            self.answer({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})

        do_HEAD = do_GET

    return Handler


@contextlib.contextmanager
def fake_hub(monkeypatch):
    """A Hub that runs until the block ends, and is the Hub of this process."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(hub, lambda: f"http://127.0.0.1:{server.server_port}"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for place, name in ((constants, "ENDPOINT"), (hf_api.api, "endpoint")):
        monkeypatch.setattr(place, name, f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        f"http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
    )
    # transformers 5.24 keeps one client; older versions use that of huggingface_hub.
    monkeypatch.setattr(transformers.utils.hub, "hf_api", lambda: hf_api.HfApi(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_fake")
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
