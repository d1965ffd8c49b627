"""What `polar up` runs: one program per part, and the settings that all of them and every command share. No I/O but the
look at ports and at what the user's own settings say.

What counts, first to last: options of `polar up`; what `up` decides (addresses, the state folder); POLAR_… in the
environment and the user's own YAML file; what `up` prefers where nobody says otherwise.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from polar.bus import BusSettings
from polar.service.settings import CONFIG_VARIABLE, read_config

from .errors import CannotUp
from .folder import Folder
from .supervisor import Program

SERVICES = ("submit", "proxy", "builder", "evaluator", "gateway")
USUAL = {"kafka": 9092, "model": 8210, "submit": 8080, "proxy": 8100, "gateway": 8720}
PORT_SETTINGS = {"submit": ("submit", "port"), "proxy": ("proxy", "port"), "gateway": ("gateway", "runtime_api_port")}
HOST = "127.0.0.1"
EMBEDDED_MODEL = "smollm2-135m"
PREFERRED: dict[str, dict[str, Any]] = {
    # one machine: nothing is gained by more partitions, and each costs the builder and the finisher a producer
    "kafka": {"partitions": 4, "task_partitions": 1, "node_partitions": 1},
    "gateway": {"drain_grace_s": 2.0},
    "proxy": {"drain_timeout": 3.0},
    "submit": {"shutdown_s": 1.0},
}
GRACE_S = 4.0
"""What services get to end in: Ctrl-C is to take seconds. What was running is run again at the next start."""


@dataclass(frozen=True)
class Wish:
    """What the user asks of `polar up`.

    `model_url`: base URLs of the engines, separated by commas; None: the embedded model, unless settings name others.
    `model`: the name asked of the engines. `without`: services not to run. `kafka_port`, `model_port`: of the embedded
    parts. `settings`: sections of settings that win over the user's. `kind`: what the folder is marked as.
    """

    directory: Path
    model_url: str | None = None
    model: str | None = None
    without: frozenset[str] = frozenset()
    kafka_port: int | None = None
    model_port: int | None = None
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    kind: str = "up"


@dataclass(frozen=True)
class Plan:
    """What is going to run. `kafka` and `engines` are the addresses, embedded or not."""

    programs: list[Program]
    config: dict[str, Any]
    kafka: str
    engines: list[str]
    model: str | None
    embedded_kafka: bool
    embedded_model: bool
    api: str | None

    def bus_settings(self) -> BusSettings:
        """For a client of this log."""
        return BusSettings(**self.config["kafka"])


def make_plan(wish: Wish, folder: Folder, environ: Mapping[str, str]) -> Plan:
    """Decide addresses, write `polar.yaml`, and say what to run.

    Raises:
        CannotUp: a port that was asked for is in use, or an option is wrong.
        ConfigWrong, ValidationError: the user's settings are wrong.
    """
    unknown = sorted(wish.without - set(SERVICES))
    if unknown:
        raise CannotUp(f"{unknown[0]!r} is no service; known: {', '.join(SERVICES)}", bad_input=True)
    user = read_config(Path(environ[CONFIG_VARIABLE])) if environ.get(CONFIG_VARIABLE) else {}
    config: dict[str, Any] = merged(user, wish.settings)
    kafka = BusSettings(**dict(wish.settings.get("kafka", {})))
    own_kafka = "bootstrap" not in kafka.model_fields_set
    several = [] if wish.model_url else _pools(config, environ)
    engines = [url for one in several for url in one["urls"]] if several else _engines(wish, config, environ)
    own_model = not engines
    model = wish.model or environ.get("POLAR_PROXY_MODEL") or config.get("proxy", {}).get("model")

    def asked(part: str) -> int | None:
        section, name = PORT_SETTINGS[part]
        said = environ.get(f"POLAR_{section}_{name}".upper()) or config.get(section, {}).get(name)
        try:
            return int(said) if said else None
        except ValueError:
            raise CannotUp(f"port {said!r} of {part} is no number", bad_input=True) from None

    # nobody types a demo's addresses, and it must not keep `polar up` from its own
    usual = {} if wish.kind == "demo" else USUAL
    ports: dict[str, int] = {}
    if own_kafka:
        ports["kafka"] = folder.port("kafka", wish.kafka_port, usual.get("kafka"))
    if own_model:
        ports["model"] = folder.port("model", wish.model_port, usual.get("model"))
    services = [one for one in SERVICES if one not in wish.without]
    for name in services:
        if name in PORT_SETTINGS:
            ports[name] = folder.port(name, asked(name), usual.get(name))
    for name in services:
        ports[f"{name}-admin"] = folder.port(f"{name}-admin", None, None)
    bootstrap = f"{HOST}:{ports['kafka']}" if own_kafka else kafka.bootstrap
    engines = engines or [f"http://{HOST}:{ports['model']}/v1"]
    proxy: dict[str, Any] = {"engines": several} if several else {"engine_urls": engines, "engines": []}
    decided: dict[str, Any] = {
        "state_dir": str(folder.path),
        "kafka": _kafka_section(kafka, bootstrap, folder.path),
        "proxy": {**proxy, **({"model": model} if model else {})},
        "gateway": {},
        "submit": {},
    }
    for name, (section, setting) in PORT_SETTINGS.items():
        if name in ports:
            decided[section][setting] = ports[name]
    if "proxy" in ports:
        decided["gateway"]["proxy_address"] = f"{HOST}:{ports['proxy']}"
    preferred: dict[str, Any] = {**PREFERRED, "shutdown_grace_s": GRACE_S}
    if not own_kafka:
        preferred.pop("kafka")  # another Kafka's topics may exist already, with counts of their own
    config = merged(preferred, config, decided)
    folder.mark.kind = wish.kind
    folder.save()
    config_path = folder.write_config(config)

    env = _environment(environ, config_path)
    programs: list[Program] = []
    if own_kafka:
        programs.append(_broker(folder, ports["kafka"], env))
    if own_model:
        programs.append(_model(folder, ports["model"], env, model or EMBEDDED_MODEL))
    programs += [_service(name, ports[f"{name}-admin"], env) for name in services]
    return Plan(
        programs=programs,
        config=config,
        kafka=bootstrap,
        engines=engines,
        model=model or (EMBEDDED_MODEL if own_model else None),
        embedded_kafka=own_kafka,
        embedded_model=own_model,
        api=f"http://{HOST}:{ports['submit']}" if "submit" in ports else None,
    )


def merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Sections laid over each other, later ones winning setting by setting."""
    found: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            below = found.get(name)
            both = isinstance(value, Mapping) and isinstance(below, Mapping)
            found[name] = {**below, **value} if both else dict(value) if isinstance(value, Mapping) else value  # type: ignore[dict-item]
    return found


def base_url(text: str) -> str:
    """An engine's base URL from what a person types: scheme and /v1 may be left out.

    Raises:
        CannotUp: it is no address.
    """
    url = text.strip().rstrip("/")
    if "://" not in url:
        url = f"http://{url}"
    scheme, _, rest = url.partition("://")
    if scheme not in ("http", "https") or not rest or rest.startswith("/"):
        raise CannotUp(f"{text!r} is no URL of an engine, such as http://127.0.0.1:8000/v1", bad_input=True)
    return url if url.endswith("/v1") else f"{url}/v1"


def _engines(wish: Wish, config: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
    said = wish.model_url or environ.get("POLAR_PROXY_ENGINE_URLS") or config.get("proxy", {}).get("engine_urls")
    return _urls(said or [])


def _pools(config: Mapping[str, Any], environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """The proxy's `engines`, each with its `urls` as a list; the proxy checks everything else of them."""
    said: Any = environ.get("POLAR_PROXY_ENGINES") or config.get("proxy", {}).get("engines") or []
    if isinstance(said, str):
        try:
            said = json.loads(said)
        except ValueError as error:
            raise CannotUp(f"POLAR_PROXY_ENGINES is no JSON: {error}", bad_input=True) from None
    if not isinstance(said, list) or not all(isinstance(one, dict) and one.get("urls") for one in said):
        raise CannotUp("proxy.engines is a list of entries, each with `urls`; see docs/engines.md", bad_input=True)
    return [one | {"urls": _urls(one["urls"])} for one in said]


def _urls(said: Any) -> list[str]:
    parts = said.split(",") if isinstance(said, str) else list(said)
    return [base_url(str(one)) for one in parts if str(one).strip()]


def _kafka_section(kafka: BusSettings, bootstrap: str, folder: Path) -> dict[str, Any]:
    """What the user has said of Kafka, in the environment too, so that commands elsewhere need no exports."""
    said: dict[str, Any] = {name: getattr(kafka, name) for name in sorted(kafka.model_fields_set)}
    plain = {
        name: value.get_secret_value() if isinstance(value, SecretStr) else value
        for name, value in said.items()
        if value is not None
    }
    return {"blob_url": (folder / "blobs").as_uri(), **plain, "bootstrap": bootstrap}


def _environment(environ: Mapping[str, str], config: Path) -> dict[str, str]:
    """The children's: the user's, without what `polar.yaml` has decided (the environment would win over it)."""
    decided = {"POLAR_STATE_DIR", "POLAR_KAFKA_BOOTSTRAP", "POLAR_PROXY_ENGINE_URLS", "POLAR_PROXY_MODEL"}
    decided |= {"POLAR_PROXY_ENGINES", "POLAR_METRICS_PORT", "POLAR_GATEWAY_PROXY_ADDRESS"}
    decided |= {f"POLAR_{section}_{name}".upper() for section, name in PORT_SETTINGS.values()}
    kept = {name: value for name, value in environ.items() if name not in decided}
    return {**kept, CONFIG_VARIABLE: str(config), "POLAR_LOG_FORMAT": "json", "PYTHONUNBUFFERED": "1"}


def _broker(folder: Folder, port: int, env: Mapping[str, str]) -> Program:
    ready = folder.path / "run" / "kafka.ready"
    argv = [sys.executable, "-m", "polar.broker", "--dir", str(folder.path / "kafka"), "--port", str(port)]
    return Program(
        name="kafka",
        argv=[*argv, "--ready-file", str(ready)],
        env=env,
        stop=3,
        ready=partial(_exists, ready),
        before=partial(ready.unlink, missing_ok=True),
    )


def _model(folder: Folder, port: int, env: Mapping[str, str], name: str) -> Program:
    ready = folder.path / "run" / "model.ready"
    argv = [sys.executable, "-m", "polar.devmodel", "serve", "--port", str(port), "--model", name]
    return Program(
        name="model",
        argv=[*argv, "--ready-file", str(ready)],
        env=env,
        stop=2,
        ready=partial(_exists, ready),
        ready_s=180.0,
        stop_s=5.0,
        hint="or name an engine of your own with --model-url",
        before=partial(ready.unlink, missing_ok=True),
    )


def _service(name: str, port: int, env: Mapping[str, str]) -> Program:
    return Program(
        name=name,
        argv=[sys.executable, "-m", "polar.cli.main", "serve", name],
        env={**env, "POLAR_METRICS_PORT": str(port)},
        # the gateway begins last, since sessions of an earlier run go on as soon as it is there and need the model; and
        # it ends first, since its boxes need the proxy and the log to end in order
        after=("kafka", "proxy", "model") if name == "gateway" else ("kafka",),
        stop=0 if name == "gateway" else 1,
        ready=partial(_answers, port),
        ready_s=90.0,
        stop_s=GRACE_S + 6.0,
    )


async def _exists(path: Path) -> bool:
    return path.exists()  # noqa: ASYNC240 - one look at a local file


async def _answers(port: int) -> bool:
    """Whether `/ready` of a service's own port says 200."""
    try:
        async with asyncio.timeout(2.0):
            reader, writer = await asyncio.open_connection(HOST, port)
            try:
                writer.write(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
