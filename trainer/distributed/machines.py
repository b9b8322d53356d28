"""Several machines of a run: whether they reach each other."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from lockstep.rollout.errors import TrainingError
from lockstep.rollout.system.addresses import address_of


def refuse_unreachable(environment: Mapping[str, str]) -> None:
    """Connect to gloo's interface on each machine; a collective of their first ranks.

    Gloo waits for one that leads nowhere five times its limit, ten hours. Raises `TrainingError` on all machines.
    """
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return  # there is no store before rank 0 has one
    machine, machines = int(environment["GROUP_RANK"]), range(int(environment["GROUP_WORLD_SIZE"]))
    master = TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))
    store = PrefixStore(f"machines/{environment.get('TORCHELASTIC_RESTART_COUNT')}", master)
    interface = environment.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    own = {name: address_of(name) for _, name in socket.if_nameindex()}
    faults = ""
    with socket.create_server((own.get(interface) or "", 0), backlog=len(machines)) as listener:
        store.set(f"place/{machine}", json.dumps([socket.gethostname(), interface, own, listener.getsockname()[1]]))
        for other in machines:
            host, name, has, port = json.loads(store.get(f"place/{other}"))
            try:
                if name and name not in has:
                    raise OSError("no such interface")
                if name and has[name]:  # otherwise gloo chooses, or it has an IPv6 address
                    socket.create_connection((has[name], port), timeout=10).close()
            except OSError as error:
                faults += f"{socket.gethostname()} cannot reach {host} by GLOO_SOCKET_IFNAME={name} of {has}: {error}. "
        store.set(f"faults/{machine}", faults)
        faults = "".join(store.get(f"faults/{other}").decode() for other in machines)  # when all have connected
    if faults:
        raise TrainingError(
            f"{faults}Set GLOO_SOCKET_IFNAME on each machine to the interface that others reach, or leave it out for "
            "the one that reaches --main_process_ip; all ports must be open between the machines (docs/launching.md)"
        )
