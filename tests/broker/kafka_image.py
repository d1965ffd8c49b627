"""Apache Kafka inside a Docker engine, for the conformance suite: which image, and a container of it.

The image is the one that POLAR_TEST_KAFKA_IMAGE names (`apache/kafka:4.1.1` where a registry is reached), or one made
on the spot of POLAR_TEST_ROOTFS, a folder or tar file with a Linux that has bash and Java, and POLAR_TEST_KAFKA_LIBS, a
folder with Kafka's jars. Both kinds take their settings from the environment in the same way. By hand:
`python -m tests.broker.kafka_image` makes the image and prints its name.
"""

import asyncio
import hashlib
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import docker  # type: ignore[import-untyped]
from docker.errors import DockerException, ImageNotFound  # type: ignore[import-untyped]
from testcontainers.core.container import DockerContainer

__all__ = ["KafkaContainer", "MissingKafkaImage", "image"]

HERE = Path(__file__).parent
PORT = 9092
STARTED_WITHIN_S = 90.0


class MissingKafkaImage(Exception):
    """There is no engine, or nothing names an image; the message says what to set."""


def image() -> str:
    """The name of an image that the engine has or can pull. Raises `MissingKafkaImage`."""
    named = os.environ.get("POLAR_TEST_KAFKA_IMAGE")
    root, libs = os.environ.get("POLAR_TEST_ROOTFS"), os.environ.get("POLAR_TEST_KAFKA_LIBS")
    if not named and not (root and libs):
        raise MissingKafkaImage(
            "set POLAR_TEST_KAFKA_IMAGE (apache/kafka:4.1.1 where a registry is reached), or POLAR_TEST_ROOTFS and "
            "POLAR_TEST_KAFKA_LIBS to make one"
        )
    try:
        engine = docker.from_env()
        engine.ping()
    except DockerException as error:
        raise MissingKafkaImage(f"no Docker engine answers: {error}") from error
    with closing(engine):
        return named or _made(engine, Path(str(root)), Path(str(libs)))


def _made(engine: docker.DockerClient, root: Path, libs: Path) -> str:
    """An image of what the two paths hold now; the same image is not made twice."""
    base = f"polar-test/root:{_digest([root])}"
    name = f"polar-test/kafka:{_digest([root, *sorted(HERE.glob('image/*')), *sorted(libs.glob('*.jar'))])}"
    if not _has(engine, name):
        if not _has(engine, base):
            _import(engine, root, base)
        with tempfile.TemporaryDirectory(prefix="kafka-image-") as scratch:
            context = Path(scratch)
            shutil.copytree(HERE / "image", context, dirs_exist_ok=True)
            shutil.copytree(libs, context / "libs", ignore=lambda _, names: {n for n in names if n[-4:] != ".jar"})
            engine.images.build(path=scratch, tag=name, buildargs={"ROOT": base}, rm=True)
    return name


def _import(engine: docker.DockerClient, root: Path, name: str) -> None:
    """`docker import` of a folder or a tar file."""
    with tempfile.TemporaryDirectory(prefix="kafka-root-") as scratch:
        archive = root
        if root.is_dir():
            archive = Path(scratch, "root.tar")
            subprocess.run(["tar", "-C", str(root), "-cf", str(archive), "."], check=True)
        repository, _, tag = name.partition(":")
        engine.api.import_image_from_file(str(archive), repository=repository, tag=tag)


def _has(engine: docker.DockerClient, name: str) -> bool:
    try:
        engine.images.get(name)
    except ImageNotFound:
        return False
    return True


def _digest(paths: list[Path]) -> str:
    """Of names, sizes and times: whether something is another file than before."""
    states = [(path.name, (state := path.stat()).st_size, state.st_mtime_ns) for path in paths]
    return hashlib.sha256(repr(states).encode()).hexdigest()[:16]


class KafkaContainer:
    """One broker in a container, from `with` until its end. `bootstrap` stays the same when it is killed and started.

    Making one raises `MissingKafkaImage`.
    """

    def __init__(self) -> None:
        self._container = DockerContainer(image())
        # A broker tells clients where it is, so its address on the host has to be known before it is started.
        self._host = self._container.get_docker_client().host().replace("localhost", "127.0.0.1")
        self._port = _free_port()
        self.bootstrap = f"{self._host}:{self._port}"
        for name, value in self._settings().items():
            self._container.with_env("KAFKA_" + name.upper().replace(".", "_"), value)
        self._container.with_env("KAFKA_HEAP_OPTS", "-Xms128m -Xmx512m").with_bind_ports(PORT, self._port)

    def __enter__(self) -> "KafkaContainer":
        self._container.start()
        try:
            self._wait()
        except BaseException:
            self._container.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._container.stop()

    @property
    def is_running(self) -> bool:
        self._container.reload()
        return self._container.status == "running"

    async def kill(self) -> None:
        """SIGKILL; what was written stays in the container."""
        await asyncio.to_thread(self._container.get_wrapped_container().kill)

    async def stop(self, timeout: int = 60) -> int:
        """SIGTERM, and SIGKILL after `timeout` seconds; returns the exit code."""
        container = self._container.get_wrapped_container()
        await asyncio.to_thread(container.stop, timeout=timeout)
        return int((await asyncio.to_thread(container.wait))["StatusCode"])

    async def start(self) -> None:
        """Start it again after `kill` or `stop`, and wait until it answers."""
        await asyncio.to_thread(self._container.get_wrapped_container().start)
        await asyncio.to_thread(self._wait)

    def _wait(self) -> None:
        deadline = time.monotonic() + STARTED_WITHIN_S
        while not _answers(self._host, self._port):
            if not self.is_running or time.monotonic() > deadline:
                said = b"".join(self._container.get_logs()).decode(errors="replace")
                raise RuntimeError(f"Apache Kafka in a container does not answer at {self.bootstrap}: {said[-2000:]}")
            time.sleep(0.1)

    def _settings(self) -> dict[str, str]:
        return {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": "1@127.0.0.1:9093",
            "controller.listener.names": "CONTROLLER",
            "listeners": f"CLIENT://0.0.0.0:{PORT},CONTROLLER://127.0.0.1:9093,SELF://127.0.0.1:9094",
            # A broker asks its own transaction coordinator over the network, where the host's port does not exist.
            "advertised.listeners": f"CLIENT://{self.bootstrap},SELF://127.0.0.1:9094",
            "inter.broker.listener.name": "SELF",
            "listener.security.protocol.map": "CLIENT:PLAINTEXT,CONTROLLER:PLAINTEXT,SELF:PLAINTEXT",
            "log.dirs": "/tmp/kafka",
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "4",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "4",
            "group.initial.rebalance.delay.ms": "0",
            "auto.create.topics.enable": "false",
            "log.retention.check.interval.ms": "2000",
            "log.cleaner.backoff.ms": "1000",
        }


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def _answers(host: str, port: int) -> bool:
    """Whether a broker answers ApiVersions there; a connection alone says only that the engine forwards the port."""
    try:
        with socket.create_connection((host, port), 2) as connection:
            connection.sendall(struct.pack(">ihhihc", 11, 18, 0, 1, 1, b"w"))
            return len(connection.recv(4)) == 4
    except OSError:
        return False


if __name__ == "__main__":
    try:
        print(image())
    except MissingKafkaImage as missing:
        sys.exit(str(missing))
