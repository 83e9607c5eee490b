"""``export --push`` against a hub in this process, by huggingface_hub's own client: what the real one refuses, it does.

The protocol: https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md, and what the client sends and expects.
Uploads by Xet (``hf_xet``) go to a storage service of their own and are not played here.
"""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import huggingface_hub
import pytest
import yaml

from muster.app.run import export
from muster.app.run.export import Exported, model_card, open_repository, push
from muster.config.load import loads
from muster.core.errors import AccessError, BackendError, ConflictError, UsageError
from muster.core.events import Event
from muster.data.weights.model_files import licence_of
from muster.report.run_view import run_view

TOKEN = "hf_" + "a" * 30


class Hub(BaseHTTPRequestHandler):
    """One server an instance of ``state``; HTTP/1.1, as the client keeps its connection."""

    protocol_version = "HTTP/1.1"

    def answer(self, code, body=None, **headers):
        data = json.dumps(body or {}).encode()
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_PUT(self):  # the storage: takes what comes, as S3 does
        state = self.server.state
        state["stored"][self.path.rpartition("/")[2]] = state["damage"](self.body())
        self.answer(200)

    def do_POST(self):
        state, body = self.server.state, self.body()
        if self.path == "/api/validate-yaml":
            content = json.loads(body)["content"]
            header = content.split("---\n")[1] if content.startswith("---\n") else ""
            errors = [] if isinstance(yaml.safe_load(header), dict) else [{"message": "no metadata"}]
            return self.answer(400 if errors else 200, {"errors": errors, "warnings": []})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, {"error": "Invalid username or password."})
        if self.path == "/api/repos/create":
            return self.create(state, json.loads(body))
        repo = "/".join(self.path.removeprefix("/api/models").split("/")[1:3]).removesuffix(".git")
        if repo not in state["repos"]:
            return self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        if repo.split("/")[0] != "me":
            return self.answer(403, {"error": "You don't have the rights"})
        if "/preupload/" in self.path:
            files = [
                {"path": each["path"], "shouldIgnore": False, "uploadMode": "lfs" if each["size"] > 1000 else "regular"}
                for each in json.loads(body)["files"]
            ]
            return self.answer(200, {"files": files})
        if self.path.endswith("/info/lfs/objects/batch"):
            return self.batch(state, json.loads(body))
        if self.path.startswith(f"/{repo}.git/info/lfs/verify"):
            return self.verify(state, json.loads(body))
        return self.commit(state, repo, body)

    def create(self, state, asked):
        repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if repo in state["repos"]:
            return self.answer(409, {"error": "You already created this model repo", "url": f"{state['url']}/{repo}"})
        if repo.split("/")[0] != "me":
            return self.answer(403, {"error": "You don't have the rights to create a model under this namespace"})
        state["repos"][repo] = {}
        state["created"].append(asked)
        return self.answer(200, {"url": f"{state['url']}/{repo}"})

    def batch(self, state, asked):
        objects = []
        for each in asked["objects"]:
            repo = self.path.removesuffix("/info/lfs/objects/batch")
            actions = {
                "upload": {"href": f"{state['url']}/storage/{each['oid']}"},
                "verify": {"href": f"{state['url']}{repo}/info/lfs/verify"},
            }
            objects.append({**each, **({} if each["oid"] in state["verified"] else {"actions": actions})})
        return self.answer(200, {"transfer": "basic", "objects": objects})

    def verify(self, state, asked):
        data = state["stored"].get(asked["oid"])
        if data is None or len(data) != asked["size"] or hashlib.sha256(data).hexdigest() != asked["oid"]:
            return self.answer(422, {"error": "the uploaded object does not match its oid"})
        state["verified"].add(asked["oid"])
        return self.answer(200)

    def commit(self, state, repo, body):
        if state["busy"]:
            return self.answer(412, {"error": "A commit has happened since. Please refresh and try again."})
        lines = [json.loads(line) for line in body.splitlines()]
        files = {}
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "lfsFile":
                if value["oid"] not in state["verified"]:
                    return self.answer(
                        400, {"error": f"LFS pointer pointed to a file that does not exist: {value['path']}"}
                    )
                files[value["path"]] = state["stored"][value["oid"]]
            else:
                files[value["path"]] = base64.b64decode(value["content"])
        state["repos"][repo].update(files)
        state["messages"].append(lines[0]["value"]["summary"])
        oid = "c" * 40
        made = {"commitUrl": f"{state['url']}/{repo}/commit/{oid}", "commitOid": oid, "success": True}
        return self.answer(200, made)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    url = f"http://127.0.0.1:{server.server_port}"
    server.state = {
        "url": url, "repos": {"other/model": {}}, "stored": {}, "verified": set(), "messages": [], "created": [],
        "busy": False, "damage": lambda data: data,
    }  # fmt: skip
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    monkeypatch.setattr("huggingface_hub._commit_api.is_xet_available", lambda: False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server.state
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path):
    found = tmp_path / "export"
    found.mkdir()
    (found / "config.json").write_text("{}")
    (found / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    (found / "README.md").write_text("---\ntags: [muster]\n---\n# mine\n")
    return found


def test_a_folder_arrives_whole_in_one_commit_and_again_in_another(hub, folder):
    api = open_repository("me/mine", public=False)
    url = push(api, folder, "me/mine", message="Step 7 of r")
    assert url.startswith(f"{hub['url']}/me/mine/commit/")
    assert hub["repos"]["me/mine"] == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert hub["messages"] == ["Step 7 of r"] and hub["created"][0]["visibility"] == "private"
    (folder / "config.json").write_text('{"a": 1}')
    push(open_repository("me/mine", public=False), folder, "me/mine", message="again")  # 409: it is there
    assert hub["repos"]["me/mine"]["config.json"] == b'{"a": 1}' and len(hub["messages"]) == 2


def test_an_adapter_arrives_without_a_path_of_this_machine(hub, folder, tmp_path):
    settings = {"base_model_name_or_path": str(tmp_path / "base"), "r": 8}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    found = Exported(folder=folder, lines=(), step=1, kind="adapter")
    replaced, lines = export._without_local_base(found)
    push(open_repository("me/mine", public=False), folder, "me/mine", message="x", replaced=replaced)
    there = json.loads(hub["repos"]["me/mine"]["adapter_config.json"])
    assert there == {"base_model_name_or_path": None, "r": 8} and "--base ORG/NAME" in lines[0]
    assert json.loads((folder / "adapter_config.json").read_text()) == settings, "the folder here still finds its base"
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen3-0.6B"}))
    assert export._without_local_base(found) == ({}, ())
    assert export._without_local_base(Exported(folder=folder, lines=(), step=1, kind="merged")) == ({}, ())


def test_a_file_that_arrives_damaged_is_refused_and_nothing_is_committed(hub, folder):
    hub["damage"] = lambda data: data[:-1] + b"\0"
    with pytest.raises(BackendError, match=r"model\.safetensors"):
        push(open_repository("me/mine", public=True), folder, "me/mine", message="x")
    assert hub["repos"]["me/mine"] == {} and hub["created"][0].get("visibility") != "private"


def test_refusals_are_one_line_with_what_to_do(hub, folder, monkeypatch):
    api = open_repository("me/mine", public=False)
    hub["busy"] = True
    with pytest.raises(ConflictError, match="was changed on the hub"):
        push(api, folder, "me/mine", message="x")
    with pytest.raises(AccessError, match="may not write to other/model"):
        push(open_repository("other/model", public=False), folder, "other/model", message="x")
    with pytest.raises(AccessError, match="may not write to other/new"):
        open_repository("other/new", public=False)
    with pytest.raises(UsageError, match="names no repository"):
        open_repository("mine", public=False)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "b" * 30)
    with pytest.raises(AccessError) as caught:
        open_repository("me/other", public=False)
    assert "b" * 30 not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(AccessError, match="needs a token"):
        open_repository("me/other", public=False)


def test_a_hub_out_of_reach_is_no_crash(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(BackendError, match="cannot be reached"):
        open_repository("me/mine", public=False)


# ---------------------------------------------------------------- the card

RUN_FILE = """\
name: sql
model: {{source: {source}, lora: {{rank: 8}}}}
data:
  sources:
  - {{type: hub, name: b-mc2/sql-create-context, split: train}}
  - {{type: file, path: {path}, weight: 2}}
training: {{steps: 10, global_batch_size: 4, optimizer: {{learning_rate: 1e-4}}}}
resources: {{device: cpu}}
"""


def evaluated(step, loss, accuracy):
    return Event(
        run_id="r", attempt=1, seq=step, mono_ns=step, wall_ns=step, host="h", rank=0, kind="eval", step=step,
        detail={"loss": loss, "execution_accuracy": accuracy, "questions": 50},
    )  # fmt: skip


FIGURES = SimpleNamespace(
    version="1.2", run_id="sql-r", steps=10, tokens=12345, wall_s=3600.0, interruptions=2,
    host_time=SimpleNamespace(hosts={}), cost=SimpleNamespace(usd=3.5),
)  # fmt: skip
"""What a card reads of a report."""


def test_a_card_says_what_was_trained_on_what_and_what_it_scored(tmp_path):
    rows = tmp_path / "secret-place" / "rows.jsonl"
    rows.parent.mkdir()
    rows.write_text('{"text": "a"}\n')
    spec = loads(RUN_FILE.format(source="Qwen/Qwen3-0.6B", path=rows), environment=False).spec
    seen = run_view([evaluated(0, 3.0, 0.02), evaluated(5, 2.0, 0.5), evaluated(10, 1.0, 0.9)])
    card = model_card(spec, seen, FIGURES, step=7, kind="merged")
    header = yaml.safe_load(card.split("---\n")[1])
    assert header["base_model"] == "Qwen/Qwen3-0.6B" and header["datasets"] == ["b-mc2/sql-create-context"]
    assert header["library_name"] == "transformers"
    assert "| loss (per supervised token) | 3.0000 | 2.0000 |" in card, "of the last evaluation before the checkpoint"
    assert "| execution accuracy | 2.0% | 50.0% |" in card and "step 5, the last evaluation before it" in card
    assert "`rows.jsonl`, weight 2" in card and "secret-place" not in card
    assert "LoRA adapters of rank 8 (merged)" in card and "$3.50" in card and "2 interruptions" in card


def test_a_card_of_a_model_from_a_folder_names_no_path_and_claims_no_score(tmp_path):
    base = tmp_path / "models" / "mine"
    base.mkdir(parents=True)
    spec = loads(RUN_FILE.format(source=base, path="rows.jsonl"), environment=False).spec
    card = model_card(spec, run_view([]), FIGURES, step=7, kind="adapter")
    assert "base_model" not in card and str(tmp_path) not in card and "`mine`" in card
    assert "Nothing was measured" in card and "library_name: peft" in card


def test_a_card_has_the_bases_licence_its_id_in_the_hubs_cache_and_how_to_load_it(tmp_path):
    base = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / ("a" * 40)
    base.mkdir(parents=True)
    metadata = "license: other\nlicense_name: 'mine'\nlicense_link: LICENSE\n"
    (base / "README.md").write_text(f"---\n{metadata}---\nlicense: x\n")
    spec = loads(RUN_FILE.format(source=base, path="rows.jsonl"), environment=False).spec
    licence = licence_of(base)
    note = "the adapter has 7 tokens"
    card = model_card(spec, run_view([]), FIGURES, step=7, kind="adapter", licence=licence, note=note)
    header = yaml.safe_load(card.split("---\n")[1])
    assert licence == {"license": "other", "license_name": "mine", "license_link": "LICENSE"}
    assert licence.items() <= header.items() and header["base_model"] == "Qwen/Qwen3-0.6B"
    assert "The adapter has 7 tokens." in card and str(tmp_path) not in card
    assert licence_of(tmp_path) == {}
