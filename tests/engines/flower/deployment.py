"""A real deployment on this machine: SuperLink and SuperNodes in processes, TLS, keys. It stops what it starts."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from leaktight.engines.flower import SWITCHED_OFF

BIN = Path(sys.executable).parent
NAME = "deployment"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Deployment:
    """Everything lies in `folder`. Started processes lead groups of their own, and are ended with their children."""

    folder: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    port: int = field(default_factory=free_port)

    def __enter__(self) -> Deployment:
        self.folder.mkdir(parents=True, exist_ok=True)
        make_certificates(self.folder)
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{NAME}"\n[superlink.{NAME}]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{self.folder / "ca.pem"}"\n'
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in list(self.processes):
            self.stop(name)

    @property
    def environment(self) -> dict[str, str]:
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        quiet = {"OMP_NUM_THREADS": "1", "FLWR_HOME": str(self.folder / "home"), "PATH": path, "NO_COLOR": "1"}
        return {**os.environ, **SWITCHED_OFF, **quiet}

    def start_superlink(self) -> None:
        self._start(
            "superlink",
            *("flower-superlink", "--host", "127.0.0.1", "--port", str(self.port), "--enable-supernode-auth"),
            *("--ssl-ca-certfile", "ca.pem", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"),
            *("--database", "superlink.db", "--disable-runtime-dependency-installation"),
        )
        wait_for(lambda: self._answers(self.port), 90, self.log("superlink"))

    def start_node(self, place: int, settings: str = "", *, register: bool = True) -> None:
        """A SuperNode with a key of its own, made and registered when it is first started."""
        name, key = f"node{place}", self.folder / f"node{place}.key"
        if not key.exists():
            make_key(key)
            if register:
                done = self.flwr("supernode", "register", str(key.with_suffix(".pub")), NAME)
                assert done.returncode == 0, done.stdout + done.stderr
        said = f'partition-id={place} state-dir="{self.folder / f"state{place}"}" {settings}'
        self._start(
            name,
            *("flower-supernode", "--superlink", f"127.0.0.1:{self.port}", "--root-certificates", "ca.pem"),
            *("--auth-supernode-private-key", key.name, "--host", "127.0.0.1", "--port", str(free_port())),
            *("--node-config", said.strip()),
        )

    def restart_node(self, place: int, settings: str = "", seconds: float = 300) -> None:
        """Start a node that was killed; Flower takes it back once it has missed heartbeats, within a minute or two."""
        log, end = self.log(f"node{place}"), time.monotonic() + seconds
        before = log.read_text().count("SuperNode ID")
        while log.read_text().count("SuperNode ID") == before:
            assert time.monotonic() < end, log.read_text()[-3000:]
            process = self.processes.get(f"node{place}")
            if process is None or process.poll() is not None:
                self.start_node(place, settings)
            time.sleep(2)

    def run(self, project: Path, run_config: str, seconds: float = 900) -> dict[str, Any]:
        """Submit the project and wait for its end; what Flower says of it."""
        run = self.submit(project, run_config)
        return self.end(run, seconds)

    def end(self, run: str, seconds: float = 900) -> dict[str, Any]:
        log = self.log("superlink")
        ended = re.compile(rf"Finished task \d+ of run {run}")
        wait_for(lambda: ended.search(log.read_text()), seconds, log)
        return self.state(run)

    def submit(self, project: Path, run_config: str) -> str:
        done = self.flwr("run", str(project), NAME, "--run-config", run_config, "--format", "json")
        assert done.returncode == 0, done.stdout + done.stderr
        return str(json.loads(done.stdout)["run-id"])

    def state(self, run: str) -> dict[str, Any]:
        done = self.flwr("list", NAME, "--run-id", run, "--format", "json")
        assert done.returncode == 0, done.stdout + done.stderr
        (state,) = json.loads(done.stdout)["runs"]
        found: dict[str, Any] = state
        return found

    def flwr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [BIN / "flwr", *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
        )

    def stop(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        process = self.processes.pop(name)
        try:
            os.killpg(process.pid, how)
            process.wait(timeout=15)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it started
            process.wait(timeout=15)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _start(self, name: str, *command: str) -> None:
        with self.log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [BIN / command[0], *command[1:]],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @staticmethod
    def _answers(port: int) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_for(condition: Any, seconds: float, log: Path) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"waited {seconds} s in vain\n{log.read_text()[-3000:]}")
        time.sleep(0.2)


def make_key(path: Path) -> None:
    """As `ssh-keygen -t ecdsa -b 384` makes it."""
    key = ec.generate_private_key(ec.SECP384R1())
    ssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    path.touch(mode=0o600)
    path.write_bytes(private)
    path.with_suffix(".pub").write_bytes(key.public_key().public_bytes(*ssh))


def make_certificates(folder: Path) -> None:
    """An authority, and a certificate of it for this machine."""
    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    signed = {
        "ca.pem": _certificate(issuer, issuer, authority, authority).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        ),
        "server.pem": _certificate(subject, issuer, server, authority).add_extension(names, critical=False),
    }
    for name, builder in signed.items():
        certificate = builder.sign(authority, hashes.SHA256())
        (folder / name).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "server.key").write_bytes(
        server.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
