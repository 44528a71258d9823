"""Network addresses: HOST:PORT, with brackets around an IPv6 host."""


class AddressError(ValueError):
    """The text is not an address; the message is one line."""


def split_address(address: str) -> tuple[str, int]:
    """Return ("host", port) of "host:port" or "[v6]:port". Raises AddressError."""
    host, colon, port = address.rpartition(":")
    # int() raises ValueError for more than 4,300 digits.
    if not colon or not host or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise AddressError(f"{address!r} is not HOST:PORT")
    if ":" in host and (host[0], host[-1]) != ("[", "]"):  # gRPC would take it for an address without a port
        raise AddressError(f"{address!r} is not HOST:PORT: an IPv6 address takes brackets, [::1]:50051")
    try:
        host.encode("idna")  # getaddrinfo() does the same, and its callers do not expect UnicodeError
    except UnicodeError:
        raise AddressError(f"{address!r} is not HOST:PORT: no host can have that name") from None
    return host.strip("[]"), int(port)


def host_of(address: str) -> str:
    """Return the host of HOST:PORT as written, an IPv6 host with its brackets."""
    return address.rpartition(":")[0]


def bare_host_of(address: str) -> str:
    """Return the host of HOST:PORT, an IPv6 host without brackets."""
    return host_of(address).strip("[]")
