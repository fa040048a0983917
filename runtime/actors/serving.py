"""This machine as a host: the function of `monarch host`, and `monarch.actor.run_worker_loop_forever`."""

from __future__ import annotations

import logging
import signal
import threading
from pathlib import Path

from monarch.runtime.actors.processes.agent import AgentOfHost
from monarch.runtime.control.agent import serve
from monarch.runtime.control.host_info import cores
from monarch.runtime.control.message import Reply
from monarch.runtime.control.records import HostInfo
from monarch.runtime.control.security import Security
from monarch.runtime.hosts.service import HostService
from monarch.runtime.processes.parent import warm_parent

_ENDING = (signal.SIGTERM, signal.SIGINT)


def serve_host(listen: str, security: Security, bind: str, advertise: str | None, tls: Path | None) -> None:
    """Be a host until a controller has it end, or, in the main thread, SIGTERM or SIGINT comes.

    `bind` is where workers listen for those of other hosts, `advertise` how these reach them, if it is another
    address, and `tls` the folder with the certificates, if there are such.
    """
    # The warm parent has to run before gRPC starts its threads.
    warm_parent()
    logging.basicConfig(format="monarch host: %(asctime)s %(levelname)s: %(message)s", level=logging.INFO)
    folder = None if tls is None else str(tls.resolve())
    ended = threading.Event()
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.signal(number, lambda *_: ended.set()) for number in _ENDING} if main else {}

    def service(reply: Reply, _: HostInfo) -> HostService:
        return HostService(reply, bind, folder, advertise, AgentOfHost(), ended.set)

    agent = serve(listen, security, service, advertise=advertise or "", data_bind=bind)
    print(f"monarch host: serving on {agent.address} ({security}), {cores()} cores", flush=True)
    ended.wait()
    for number in handlers:
        signal.signal(number, signal.SIG_DFL)  # a second one does not wait for anything
    agent.close()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    print("monarch host: ended", flush=True)
