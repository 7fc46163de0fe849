"""Revisions from a hub on loopback, and where there is none."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from gripmoe.cli.main import main
from gripmoe.config.project import Project
from gripmoe.planning.revisions import unpinned

CONFIG = Path(__file__).parents[2] / "workflow" / "config"


class Hub(BaseHTTPRequestHandler):
    """Answers for every repository with a commit made of its name's length."""

    def do_GET(self):
        name = self.path.removeprefix("/api/models/").removeprefix("/api/datasets/").split("?")[0]
        body = json.dumps({"id": name, "sha": f"{len(name):040d}"}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def pinned(world: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "gripmoe.cli.main", "pin", "--world", world, "--config", str(CONFIG)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


def test_pinning_names_every_model_and_data_set(hub, tmp_path):
    said = pinned("paper", HF_ENDPOINT=hub, HF_HUB_OFFLINE="0", HF_HOME=str(tmp_path))
    assert said.returncode == 0, said.stderr
    models, benchmarks = (yaml.safe_load(f"#{part}") for part in said.stdout.split("# add to")[1:])
    assert models["qwen3_30b_a3b"] == {"revision": f"{len('Qwen/Qwen3-30B-A3B'):040d}"}
    assert benchmarks["wmdp_cyber"]["data"]["revisions"]["cais/wmdp"] == f"{len('cais/wmdp'):040d}"


def test_without_a_hub_it_says_what_to_do(tmp_path):
    said = pinned("paper", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert said.returncode == 2
    assert "models.yaml: " in said.stderr and "Run this where there is internet" in said.stderr


def test_an_error_of_the_hub_without_a_text_is_named_by_its_kind(monkeypatch, capsys):
    def refuses(*_, **__):
        raise ConnectionError

    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", refuses)
    assert main(["pin", "--world", "paper", "--config", str(CONFIG)]) == 2
    assert "(ConnectionError: )" in capsys.readouterr().err


def test_an_embedded_world_reads_nothing_from_the_hub():
    assert list(unpinned(Project(CONFIG, "tiny"))) == []
