"""A real MLflow tracking server on localhost, for tests of the tracker and of jobs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from benchmarks.localhost import free_port

SERVER_START_S = 300


class Server:
    """An MLflow tracking server in a process of its own; its address is known before it runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        store = ["--backend-store-uri", f"sqlite:///{self.folder / 'server.db'}"]
        files = ["--artifacts-destination", str(self.folder / "artifacts")]
        where = ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", *store, *files, *where],
                env={**os.environ, **quiet},
                cwd=self.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        transport = httpx.HTTPTransport(retries=0)
        with httpx.Client(transport=transport, timeout=2, trust_env=False) as client:
            self._wait_until_healthy(client)

    def _wait_until_healthy(self, client: httpx.Client) -> None:
        """Poll until the server answers; its process is waited for between attempts, so a crash is seen at once."""
        for _ in range(2 * SERVER_START_S):
            try:
                if client.get(f"{self.uri}/health").status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            assert self._process is not None
            try:
                self._process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                continue
            break
        raise AssertionError((self.folder / "server.log").read_text(encoding="utf-8"))

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
