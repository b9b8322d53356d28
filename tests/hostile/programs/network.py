# Connects to this machine, to the network, and to Unix sockets of the host.
# prints: held
import socket

broke = []
for family, address in (
    (socket.AF_INET, ("127.0.0.1", 22)),
    (socket.AF_INET, ("1.1.1.1", 53)),
    (socket.AF_INET, ("169.254.169.254", 80)),
    (socket.AF_INET6, ("::1", 22)),
    (socket.AF_UNIX, "/var/run/docker.sock"),
    (socket.AF_UNIX, "/run/dbus/system_bus_socket"),
    (socket.AF_UNIX, "\0lockstep-hostile-listener"),
):
    with socket.socket(family) as client:
        client.settimeout(1)
        try:
            client.connect(address)
            broke.append(str(address))
        except OSError as error:
            if error.errno not in (2, 22, 99, 101, 111):  # not there, invalid, no address, unreachable, refused
                broke.append(f"{address}: {error}")
print(*([f"broke {name}" for name in broke] or ["held"]))
