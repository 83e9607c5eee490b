"""The part of MLflow's REST API that a run's figures need, by a server that can refuse, hang and fail.

Paths and fields: https://mlflow.org/docs/latest/api_reference/rest-api.html (2.0). As the real one it keeps a metric's
point once, however often it is sent.
"""

import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


class MLflowServer:
    """``mode``: ``ok``, ``hangs`` (a request continues once the mode changes), ``500``, ``refuses`` (no listener)."""

    def __init__(self):
        self.experiments, self.runs, self.requests = {}, {}, 0
        self._lock, self._server, self.port, self.mode = threading.Lock(), None, 0, "refuses"
        self.set("ok")
        self.url = f"http://127.0.0.1:{self.port}"

    def set(self, mode):
        self.mode = mode
        if mode == "refuses" and self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        elif mode != "refuses" and self._server is None:
            outer = self

            class Handler(_Handler):
                server_state = outer

            self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
            self._server.daemon_threads = True
            self.port = self._server.server_address[1]
            threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, call, given):
        """(status, answer) of one request."""
        with self._lock:
            self.requests += 1
            match call:
                case "experiments/get-by-name":
                    found = self.experiments.get(given["experiment_name"])
                    if found is None:
                        return 404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no such experiment"}
                    return 200, {"experiment": {"experiment_id": found, "name": given["experiment_name"]}}
                case "experiments/create":
                    self.experiments[given["name"]] = str(len(self.experiments) + 1)
                    return 200, {"experiment_id": self.experiments[given["name"]]}
                case "runs/search":
                    tag = re.fullmatch(r"tags\.`(.+)` = '(.+)'", given["filter"])
                    tags = {"key": tag[1], "value": tag[2]}
                    return 200, {"runs": [self._run(run) for run in self.runs.values() if tags in run["tags"]]}
                case "runs/create":
                    run_id = f"{len(self.runs):032x}"
                    self.runs[run_id] = {
                        "id": run_id, "name": given["run_name"], "tags": given["tags"], "status": "RUNNING",
                        "experiment": given["experiment_id"], "points": {}, "params": {}, "statuses": [],
                    }  # fmt: skip
                    return 200, {"run": self._run(self.runs[run_id])}
                case "runs/get":
                    return 200, {"run": self._run(self.runs[given["run_id"]])}
                case "runs/update":
                    run = self.runs[given["run_id"]]
                    if "status" in given:
                        run["status"] = given["status"]
                        run["statuses"].append(given["status"])
                    return 200, {"run_info": self._run(run)["info"]}
                case "runs/log-batch":
                    run = self.runs[given["run_id"]]
                    run["params"] |= {param["key"]: param["value"] for param in given.get("params", [])}
                    for point in given.get("metrics", []):
                        key = (point["key"], int(point.get("step", 0)), int(point["timestamp"]), point["value"])
                        run["points"].setdefault(key, None)
                    return 200, {}
        return 404, {"error_code": "ENDPOINT_NOT_FOUND", "message": call}

    def steps(self, key="train/loss"):
        """Of the only run, in the order in which they came."""
        (run,) = self.runs.values()
        return [step for name, step, _, _ in run["points"] if name == key]

    def _run(self, run):
        info = {
            "run_id": run["id"], "run_uuid": run["id"], "run_name": run["name"], "status": run["status"],
            "experiment_id": run["experiment"], "lifecycle_stage": "active", "artifact_uri": "mlflow-artifacts:/x",
        }  # fmt: skip
        return {"info": info, "data": {"tags": run["tags"]}}


class _Handler(BaseHTTPRequestHandler):
    server_state: MLflowServer

    def do_GET(self):
        url = urlsplit(self.path)
        self._answer(url.path, {key: values[0] for key, values in parse_qs(url.query).items()})

    def do_POST(self):
        self._answer(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, path, given):
        state = self.server_state
        while state.mode == "hangs":
            time.sleep(0.02)
        status, answer = 500, {}
        if state.mode == "ok":
            status, answer = state.answer(path.partition("/mlflow/")[2], given)
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass
