"""A run → an OpenAI-compatible endpoint, by transformers' own server; there is none of ours."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from forge._errors import SettingsError
from forge._printable import printable
from forge.saving._directories import trained_for
from forge.saving._system_prompt import run_system_prompt
from forge.talking._model import find_model
from forge.talking._transformers_server import names_of

_LAST_SECONDS = 3.0
"""Seconds in which requests that are being answered are told that the server ends."""
_NEEDED = ("fastapi", "uvicorn", "openai", "pydantic", "typer")


def serve(model_path: str | Path, *, host: str = "127.0.0.1", port: int = 8000, system: str | None = None) -> int:
    """Serve a model over HTTP as OpenAI's interface has it, with `transformers serve`.

    Args:
        model_path: A model directory, a run directory (its last export), or a hub name.
        host: Address to listen on; by default this machine alone can reach it.
        port: Port to listen on.
        system: A system message of conversations that have none. By default the run's `system_prompt`, if it has one; "" for
            none.

    Returns:
        The exit status of the server, where it ends by itself; 128 and more if a signal to it alone ended it.

    Raises:
        KeyboardInterrupt: Ctrl-C ended it, or a signal to the command line.
        SettingsError: there is no model, it is an adapter, the address cannot be listened on, or what the server needs is
            not installed: the message has the commands of other servers.
        forge_dist.ModelError: the hub cannot be asked for the name.

    """
    if not 0 < port < 65536:
        raise SettingsError(f"port must be from 1 to 65535, not {port}.")
    directory = find_model(model_path)
    own = run_system_prompt(directory) if system is None else None
    asked_with = own or system or ""
    if Path(directory).is_dir():
        directory = str(Path(directory).expanduser().resolve())
    if (Path(directory) / "adapter_config.json").is_file():
        raise SettingsError(
            f"{directory} is an adapter, and servers want a whole model: `forge export {shlex.quote(str(model_path))} --merge` "
            "writes one."
        )
    command = ["serve", directory, "--host", host, "--port", str(port)]
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise SettingsError(
            f"transformers' server needs {', '.join(missing)}: `pip install 'forge-llm[serve]'`. Or, with the same model:\n"
            + "\n".join(_others(directory, host, port))
        )
    _check_address(host, port)
    shown = "localhost" if host == "127.0.0.1" else host
    given = str(model_path)
    name = names_of(directory, given)[-1]
    print(
        f"loads the model, then answers at http://{shown}:{port}/v1/chat/completions, model {name!r}; Ctrl-C ends it",
        file=sys.stderr,
    )
    if (kind := trained_for(directory)) is not None:
        print(
            f"serves the unrounded weights of a run with qat={kind}, whose figures are of rounded ones. To serve those: "
            f"`forge export {shlex.quote(str(Path(directory).parent.parent))} --output model-gguf --format gguf && "
            "llama-server -m model-gguf/*.gguf`",
            file=sys.stderr,
        )
    if own is not None:
        shown = shlex.quote(printable(own, keep="\n"))
        print(
            f"conversations without a system message are given the run's system_prompt {shown}; not so: --system ''",
            file=sys.stderr,
        )
    environ = {**os.environ, "HF_HUB_DISABLE_UPDATE_CHECK": "1"}  # nobody asked it to ask the network
    program = "forge.talking._server_program"
    server = subprocess.Popen([sys.executable, "-m", program, given, asked_with, *command], env=environ)  # noqa: S603 - no shell, fixed words
    try:
        status = server.wait()
    finally:
        if server.poll() is None:
            # Ctrl-C reaches the server too; a signal to this process alone does not.
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(_LAST_SECONDS)
            server.kill()  # it may be in the middle of a long forward
            server.wait()
    return status if status >= 0 else 128 - status


def _check_address(host: str, port: int) -> None:
    """Refuse an address before the model is read: the server tries it only after that."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"host: {host!r} is no address: {error}. Leave `host` out, or give one of this machine.") from error
    refused: list[OSError] = []
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as tried:
                # As asyncio binds: connections that a server before left behind hold no port, nor does IPv4 one of IPv6.
                if os.name == "posix":
                    tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                tried.bind(address)
        except OSError as error:
            refused.append(error)
    why = next((each for each in refused if each.errno == errno.EADDRINUSE), None)
    if why is not None:
        raise SettingsError(f"port: {port} of {host} is taken by another program. End it, or give another `port`.") from why
    if refused and len(refused) == len(found):  # a name may have an address of a family that the machine has not
        why = refused[0]
        raise SettingsError(
            f"port: {port} of {host} cannot be listened on: {why.strerror}. Give another `port` (from 1024 on anyone may), or "
            "an address of this machine as `host`."
        ) from why


def _others(directory: str, host: str, port: int) -> list[str]:
    """Return the commands of servers that take the same model."""
    path = shlex.quote(directory)
    return [
        f"  transformers serve {path} --host {host} --port {port}",
        f"  vllm serve {path} --host {host} --port {port}",
        f"  forge export {path} --output model-gguf --format gguf && "
        f"llama-server -m model-gguf/*.gguf --host {host} --port {port}",
    ]
